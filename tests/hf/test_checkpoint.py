"""Saved and loaded again: here, in a fresh process, without the package, from the teacher's own checkpoint."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import linearize
from linearize.hf.attention import linearized_layers
from linearize.hf.classes import CONFIG_CLASSES, MODEL_CLASSES, plan_to_config, read_plan
from linearize.mixers.linear import LinearMixer
from tests.hf import encoders
from tests.hf.checks import assert_close, left_padding, positions
from tests.hf.decoders import ARCHITECTURES as OTHERS
from tests.hf.models import (
    ARCHITECTURES,
    CASE,
    Case,
    make_student,
    make_teacher,
    random_tokens,
    student_of,
    teacher_of,
)

# By the name of their folder: every architecture, and some with other mixers.
NAMED = ("llama-mixed", "mistral-terraced", "qwen3-sinks", "gpt2-sliding")
SAVED = {CASE[name].architecture: CASE[name] for name in NAMED}
SAVED |= {name: CASE[name] for name in ("performer-qwen3", "rfa-gpt2", "gated-delta-llama")}
SAVED |= {name: Case("", name, convert_sliding=True) for name in OTHERS}
# Of BERT's, the base model is the one that remote code loads.
ENCODED = {name: encoders.Case(name, head="ForMaskedLM") for name in ("roberta", "albert", "modernbert")}
ENCODED |= {"distilbert": encoders.Case("distilbert", head="ForSequenceClassification")}
ENCODED |= {name: encoders.Case(name, head="ForImageClassification") for name in ("deit", "dinov2")}
ENCODED |= {name: encoders.Case(name) for name in ("bert", "vit")}
DECODER_HEADS = [
    pytest.param(name, auto, marks=[pytest.mark.slow] if name in OTHERS and "Sequence" not in auto else [])
    for name in (*ARCHITECTURES, *OTHERS)
    for auto in MODEL_CLASSES[f"linearized_{name}"]
]
ENCODER_HEADS = [
    pytest.param(name, auto, cls.__bases__[-1].__name__, id=f"{name}-{auto}" + f"-{number}" * (number > 0))
    for name in encoders.ENCODERS
    for auto, classes in MODEL_CLASSES[f"linearized_{name}"].items()
    for number, cls in enumerate(classes)
]
Inputs = dict[str, Tensor]


def padded_rows() -> Inputs:
    ids, mask = random_tokens(2, 20), left_padding([6, 0], 20)
    return dict(input_ids=ids, attention_mask=mask, position_ids=positions(mask))


def outputs(model: PreTrainedModel, inputs: Inputs | None = None) -> Tensor:
    """Logits, or hidden states where there is no head; of left-padded rows, unless other inputs are given."""
    with torch.no_grad():
        return model(**(padded_rows() | dict(use_cache=False) if inputs is None else inputs))[0]


def student_and_inputs(name: str) -> tuple[PreTrainedModel, Inputs]:
    """What lies in the folder `name`."""
    if name in ENCODED:
        return encoders.student_of(ENCODED[name]), encoders.inputs_of(name)
    return student_of(SAVED[name]), padded_rows()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of students, each with inputs."""
    folder = tmp_path_factory.mktemp("students")
    for name in (*SAVED, *ENCODED):
        student, inputs = student_and_inputs(name)
        copy.deepcopy(student).save_pretrained(folder / name)
        save_file({key: x.contiguous() for key, x in inputs.items()}, folder / name / "inputs.safetensors")
    return folder


@pytest.fixture(scope="module")
def fresh_process(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What `fresh_process.py` says and the folder with the outputs that it wrote."""
    folder = tmp_path_factory.mktemp("loaded")
    environment = os.environ | dict(HF_HOME=str(folder), HF_MODULES_CACHE=str(folder / "modules"), HF_HUB_OFFLINE="1")
    command = [sys.executable, Path(__file__).with_name("fresh_process.py"), checkpoints, folder]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


@pytest.mark.parametrize("name", [*SAVED, *ENCODED, "remote llama", "remote bert"])
def test_loads_in_a_fresh_process(name: str, fresh_process: tuple[dict[str, Any], Path]) -> None:
    """Remote: nothing imported, `trust_remote_code=True`; the module beside the weights finds the package."""
    report, folder = fresh_process
    student, inputs = student_and_inputs(name.removeprefix("remote "))
    assert report[name] == f"linearize.hf.classes.{type(student).__name__}"
    assert_close(load_file(folder / f"{name}.safetensors")["first"], outputs(student, inputs))


def test_remote_code_is_saved_as_it_was(fresh_process: tuple[dict[str, Any], Path]) -> None:
    """transformers copies the source of classes that remote code names; ours lies in the package."""
    report, _ = fresh_process
    assert report["again's files"] == ["modeling_linearize.py"] * 2
    assert {reference.partition(".")[0] for reference in report["again"].values()} == {"modeling_linearize"}


def test_without_the_package_it_says_what_to_install(fresh_process: tuple[dict[str, Any], Path]) -> None:
    assert "pip install linearize" in fresh_process[0]["without the package"]


def assert_comes_back(
    teacher: PreTrainedModel, student: PreTrainedModel, auto: str, inputs: Inputs | None, folder: Path
) -> None:
    found, expected = outputs(student, inputs), outputs(teacher, inputs)
    student.save_pretrained(folder)
    for options in ({}, {"attn_implementation": "eager"}):  # which takes the place of what config.json says
        with pytest.raises(ValueError, match="load this model by an Auto class, after `import linearize`"):
            type(teacher).from_pretrained(folder, **options)
    exact: dict[str, Any] = dict(attn_implementation=teacher.config._attn_implementation)
    if hasattr(teacher.config, "num_experts_per_tok"):
        exact["experts_implementation"] = "eager"
    loaded = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float64, **exact)
    assert type(loaded) is type(student) and type(student).__name__ == f"Linearized{type(teacher).__name__}"
    assert_close(outputs(loaded, inputs), found)
    assert not torch.allclose(found, expected)
    with linearize.softmax_attention(loaded):
        assert_close(outputs(loaded, inputs), expected)


@pytest.mark.parametrize("architecture, auto", DECODER_HEADS)
def test_every_head_of_decoders_comes_back(architecture: str, auto: str, tmp_path: Path) -> None:
    teacher = make_teacher(architecture, auto.removeprefix("AutoModel"))
    assert_comes_back(
        teacher, make_student(Case("", architecture, convert_sliding=True), teacher), auto, None, tmp_path
    )


@pytest.mark.parametrize("architecture, auto, base", ENCODER_HEADS)
def test_every_head_of_encoders_comes_back(architecture: str, auto: str, base: str, tmp_path: Path) -> None:
    case = encoders.Case(architecture, head=base.removeprefix(encoders.ENCODERS[architecture][0]))
    inputs = encoders.inputs_of(architecture)
    if auto == "AutoModelForMultipleChoice":  # of DistilBERT's, it takes no positions
        inputs = {name: torch.stack([x, x.flip(0)], dim=1) for name, x in inputs.items() if name != "position_ids"}
    assert_comes_back(encoders.teacher_of(case), encoders.make_student(case), auto, inputs, tmp_path)


WITHOUT_MIXERS = CASE["llama-window-only"]  # its weights are the teacher's, names and shapes too


@pytest.mark.parametrize(
    "options",
    [
        dict(attn_implementation="sdpa"),
        dict(attn_implementation="eager", dtype=torch.bfloat16, device_map="cpu"),
        dict(attn_implementation="eager", ignore_mismatched_sizes=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"])
def test_classes_of_transformers_refuse_the_folder(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    student_of(WITHOUT_MIXERS).save_pretrained(tmp_path, max_shard_size="20KB")
    base: Any = getattr(transformers, name)
    config = transformers.LlamaConfig.from_pretrained(tmp_path)
    for given in (options, options | {"config": str(tmp_path)}, options | {"config": config}):
        with pytest.raises(ValueError, match="load this model by an Auto class, after `import linearize`"):
            base.from_pretrained(tmp_path, **given)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert type(loaded).__name__ == "LinearizedLlamaForCausalLM"
    assert not hasattr(loaded.config, "transformers_weights")


def test_classes_of_transformers_take_the_weights_under_another_config(tmp_path: Path) -> None:
    """Nothing else in the folder keeps them from it: docs/generation.md says so."""
    student, teacher = student_of(WITHOUT_MIXERS), teacher_of(WITHOUT_MIXERS)
    student.save_pretrained(tmp_path)
    loaded: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=teacher.config, dtype=torch.float64)
    assert_close(outputs(loaded), outputs(teacher))


def test_a_folder_with_the_mark_of_older_versions(tmp_path: Path) -> None:
    student = student_of(WITHOUT_MIXERS)
    student.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del config["transformers_weights"]
    assert config["attn_implementation"].startswith("linearize")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert_close(outputs(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)), outputs(student))


def test_every_registered_class_is_an_attribute_of_its_module() -> None:
    for heads in MODEL_CLASSES.values():
        for cls in itertools.chain.from_iterable(heads.values()):
            assert getattr(sys.modules[cls.__module__], cls.__name__) is cls


def test_bfloat16_keeps_mixers_in_float32(checkpoints: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(checkpoints / "qwen3", dtype=torch.bfloat16)
    saved = dict(student_of(CASE["qwen3-sinks"]).named_parameters())
    for name, parameter in loaded.named_parameters():
        dtype = torch.float32 if ".mixer." in name else torch.bfloat16
        assert parameter.dtype == dtype
        assert torch.equal(parameter, saved[name].to(dtype))
    assert outputs(loaded).isfinite().all()


@pytest.mark.parametrize("architecture", encoders.ENCODERS)
def test_an_encoder_s_folder_with_a_linearized_config_is_a_conversion(architecture: str, tmp_path: Path) -> None:
    """What transformers renames in older checkpoints of a base, it renames for ours too."""
    teacher = encoders.make_encoder(architecture).float()
    teacher.save_pretrained(tmp_path)
    student = linearize.convert(teacher, encoders.Case(architecture).recipe())
    loaded, report = type(student).from_pretrained(
        tmp_path, config=student.config, dtype=torch.float32, output_loading_info=True
    )
    assert report["missing_keys"] == {name for name in student.state_dict() if ".mixer." in name}
    assert not report["unexpected_keys"]
    for name, parameter in student.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


def test_random_mixers_that_a_checkpoint_lacks(tmp_path: Path) -> None:
    teacher = make_teacher("llama").float()
    teacher.save_pretrained(tmp_path)
    case = Case("", overrides={"mixer.feature_map.init": "kaiming"})
    student = linearize.convert(teacher, case.recipe())
    loaded = type(student).from_pretrained(tmp_path, config=student.config)
    for layers in zip(*(linearized_layers(model).values() for model in (loaded, student)), strict=True):
        found, expected = (layer.mixer.feature_map.query_weight.detach() for layer in layers)
        assert found.isfinite().all()
        assert not torch.equal(found, expected)
        assert found.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.1)


def test_a_config_makes_more_than_one_model() -> None:
    """`install` writes into the config that a model is made from."""
    student = student_of(CASE["llama-sliding"])
    again = type(student)(copy.deepcopy(student.config)).double()
    again.load_state_dict(student.state_dict())
    assert_close(outputs(again), outputs(student))
    with linearize.softmax_attention(again), linearize.softmax_attention(student):
        assert_close(outputs(again), outputs(student))


@pytest.mark.parametrize("case", [CASE["llama-sliding"], CASE["gpt2-mixed"]], ids=lambda case: case.name)
@pytest.mark.parametrize("through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(through: Any, case: Case) -> None:
    student = student_of(case)
    copied = through(student)
    assert type(copied) is type(student)
    assert torch.equal(outputs(copied), outputs(student))
    expected = outputs(student)
    with linearize.softmax_attention(copied):
        assert torch.equal(outputs(student), expected)
        assert not torch.allclose(outputs(copied), expected)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(outputs(student), expected)


def test_a_format_says_what_is_needed_to_read_it() -> None:
    """What an older version can read has no field that it does not know."""
    names = ("llama-mixed", "llama-heads", "llama-cache")
    plain, mixed, cached = (read_plan(student_of(CASE[name]).config) for name in names)
    stored = plan_to_config(plain)
    assert stored["format_version"] == 1 and not any("cache" in layer for layer in stored["layers"] if layer)
    for plan in (mixed, cached):
        assert plan_to_config(plan)["format_version"] == 2
    for plan in (plain, mixed, cached):
        config = CONFIG_CLASSES["llama"](linearize=json.loads(json.dumps(plan_to_config(plan))))
        assert read_plan(config) == plan


def test_a_checkpoint_of_another_version(checkpoints: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoints / "llama" / "config.json").read_text(encoding="utf-8"))
    config["linearize"]["format_version"] = 99
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=r"format_version: expected 1 or 2, found 99; install the version"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    del config["linearize"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected a layer plan, found None"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))


def test_a_plan_for_another_depth(checkpoints: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoints / "llama")
    config.num_hidden_layers = 2
    with pytest.raises(ValueError, match=r"layers: expected 2 layers, found 3"):
        AutoModelForCausalLM.from_config(config)


def test_what_is_written(checkpoints: Path) -> None:
    config = json.loads((checkpoints / "qwen3" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "linearized_qwen3"
    assert config["linearize"]["format_version"] == 1
    assert [layer["span"] for layer in config["linearize"]["layers"]] == 3 * [
        dict(type="sliding", window_size=5, sinks=2)
    ]
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_linearize.LinearizedQwen3ForCausalLM"
    module = (checkpoints / "qwen3" / "modeling_linearize.py").read_text(encoding="utf-8")
    assert "from linearize.hf.classes import LinearizedQwen3Config, LinearizedQwen3ForCausalLM" in module
    assert len(list(linearized_layers(student_of(CASE["qwen3-sinks"])))) == 3
    mixers = [m for m in student_of(CASE["llama-mixed"]).modules() if isinstance(m, LinearMixer)]
    assert len(mixers) == 2
