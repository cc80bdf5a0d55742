from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from linearize.demo.corpus import HELD_OUT_MODULES, teacher_path

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_demo_teacher.py"
TINY = shlex.split("--vocab-size 400 --context 64 --layers 2 --hidden-size 32 --heads 2 --kv-heads 1 --head-dim 16")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_demo_teacher", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "sources"
    folder.mkdir()
    for number in range(60):
        body = "\n".join(f"def call_{number}_{line}(self, value):\n    return value + {line}\n" for line in range(10))
        (folder / f"module_{number}.py").write_text(body, encoding="utf-8")
    return folder


@pytest.fixture
def held_out(script, monkeypatch):
    texts = [
        "\n".join(f"def apply_{line}(self, value):\n    return value + {line}\n" for line in range(start, start + 5))
        for start in range(24)
    ]
    monkeypatch.setattr(script, "standard_library_texts", lambda: ([], texts))
    return texts


def test_it_learns_and_writes_a_folder_that_transformers_reads(script, sources, held_out, tmp_path, capsys):
    output = tmp_path / "out" / "teacher"
    budget = shlex.split("--tokens 8000 --intermediate-size 48 --held-out-rows 20 --device cpu")
    assert script.main(["--output-dir", str(output), "--sources", str(sources), *TINY, *budget]) == 0
    log = capsys.readouterr().err
    losses = [float(loss) for loss in re.findall(r"step \d+/31: loss ([\d.]+)", log)]
    assert losses[0] == pytest.approx(5.99, abs=0.3)  # log 400
    assert losses[-1] < losses[0] - 1.5
    assert float(re.search(r"held-out loss ([\d.]+)", log)[1]) < losses[0] - 1

    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer.decode(tokenizer("naïve = 'ß'\n\tpass")["input_ids"]) == "naïve = 'ß'\n\tpass"
    assert len(tokenizer) == model.config.vocab_size <= 400
    assert str(model.dtype) == "torch.bfloat16"
    assert [path.name for path in output.parent.iterdir()] == ["teacher"]  # no scratch folder is left


@pytest.mark.parametrize("model_type, per_layer, others", [("llama", 7, 1 + 2 * 2 + 1), ("gpt2", 4, 2 + 2 * 8 + 2)])
def test_matrices_have_an_optimizer_of_their_own(script, model_type, per_layer, others):
    args = script.parser().parse_args(["--output-dir", "unused", *TINY, "--model-type", model_type])
    model = script.build_model(args, 400)
    assert (model.config.model_type, model.config.max_position_embeddings) == (model_type, 64)
    muon, adamw = script.build_optimizers(model, 0.02, 0.003)
    assert [len(muon.param_groups[0]["params"]), len(adamw.param_groups[0]["params"])] == [2 * per_layer, others]
    assert all(x.ndim == 2 and 400 not in x.shape for x in muon.param_groups[0]["params"])


def test_it_goes_on_from_a_model_with_a_longer_reach(script, sources, held_out, tmp_path, capsys):
    torch.manual_seed(0)
    args = script.parser().parse_args(["--output-dir", "unused", *TINY, "--intermediate-size", "48"])
    tokenizer = script.train_tokenizer(script.training_texts([sources]), args.vocab_size, args.context)
    before = script.build_model(args, len(tokenizer))
    before.save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    longer = shlex.split("--context 256 --rope-theta 50000 --join 9000 --repeats 0.5 --tokens 512 --batch-size 1")
    given = [
        "--output-dir",
        str(tmp_path / "long"),
        "--sources",
        str(sources),
        "--continue-from",
        str(tmp_path / "short"),
    ]
    assert script.main([*given, *longer, "--held-out-rows", "20", "--muon-lr", "1e-9", "--adamw-lr", "1e-9"]) == 0
    assert "step 2/2" in capsys.readouterr().err
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "long", dtype=torch.float32)
    assert after.config.max_position_embeddings == 256 and after.config.rope_parameters["rope_theta"] == 50000
    for name, weight in before.state_dict().items():  # the shape is its own, and the weights, in bfloat16
        torch.testing.assert_close(after.state_dict()[name], weight, rtol=1e-2, atol=1e-6)
    stored = AutoTokenizer.from_pretrained(tmp_path / "long")
    assert stored.model_max_length == 256 and stored("def call")["input_ids"] == tokenizer("def call")["input_ids"]


def test_files_next_to_each_other_are_joined(script):
    assert script.joined(["ab", "c", "def", "g"], 3) == ["ab\nc", "def", "g"]
    assert script.joined(["ab", "c"], 1) == ["ab", "c"] and script.joined([], 1) == []


def test_a_failure_while_writing_leaves_nothing_behind(script, tmp_path):
    with pytest.raises(OSError, match="no space"), script.atomic_folder(tmp_path / "teacher") as folder:
        (folder / "config.json").write_text("{}", encoding="utf-8")
        raise OSError("no space")
    assert list(tmp_path.iterdir()) == []


def test_held_out_modules_are_not_trained_on(script, tmp_path):
    files = {"networkx/__init__": "n", "networkx/readwrite/graph6": "g", "json/__init__": "", "json/encoder": "e"}
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert script.training_texts([tmp_path]) == ["n"]
    with pytest.raises(script.UserError, match=r"found none"):
        script.training_texts([tmp_path / "json"])


def test_held_out_modules_of_packages_are_those_of_the_bundled_teacher(script):
    readme = (teacher_path() / "README.md").read_text(encoding="utf-8").split("From packages:")[1]
    listed = set()
    for package, modules in re.findall(r"- `(\w+)`: (.*)", readme):
        listed |= {f"{package}.{module}" for module in re.findall(r"`([\w.]+)`", modules)}
    assert listed == script.HELD_OUT_IN_PACKAGES
    assert not listed & HELD_OUT_MODULES


def test_the_defaults_are_the_bundled_teacher(script):
    args = script.parser().parse_args(["--output-dir", "unused"])
    ours = script.build_model(args, args.vocab_size).config.to_dict()
    bundled = AutoModelForCausalLM.from_pretrained(teacher_path()).config.to_dict()
    only_files_have = {"_name_or_path", "architectures", "dtype"}
    assert {key: ours[key] for key in ours.keys() - only_files_have} == {
        key: bundled[key] for key in bundled.keys() - only_files_have
    }


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sources", "nowhere"], "--sources: expected a folder, found 'nowhere'"),
        (["--packages", "no_such_package"], "packages: expected the import name"),
        (["--packages", "this"], "packages: expected the import name"),
        (["--continue-from", "nowhere"], "--continue-from: expected a model's folder, found 'nowhere'"),
        (["--repeats", "2"], "--repeats: expected a share between 0 and 1, found 2.0"),
        (["--heads", "3"], "--kv-heads: expected a divisor of --heads (3), found 2"),
    ],
)
def test_mistakes_are_said_in_one_line(script, tmp_path, capsys, arguments, message):
    assert script.main(["--output-dir", str(tmp_path / "new"), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_an_existing_folder_is_not_overwritten(script, tmp_path, capsys):
    assert script.main(["--output-dir", str(tmp_path)]) == 2
    assert "expected a folder that does not exist yet" in capsys.readouterr().err
