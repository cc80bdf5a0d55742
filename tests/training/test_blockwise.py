"""Attention transfer block by block is attention transfer of all layers at once, and needs one block in memory."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import linearize
from linearize.base import UserError
from linearize.configs.training import Plateau
from linearize.hf.checkpoint import load_model
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.recipe import Recipe
from linearize.training import activations, blockwise, loop
from linearize.training.attention_transfer import attention_transfer, load_transferred, transfer_errors
from linearize.training.blockwise import BlockwiseTransfer, merged_metrics
from linearize.training.locks import claimed
from tests import tiny

CPU = torch.device("cpu")
TRAIN, VALIDATION = tiny.packed([[48], [20, 28]] * 5, seed=1), tiny.packed([[48], [30, 18], [48]], seed=2)
# Whatever could tell joint from block-wise training: the schedule, clipping and stopping of each layer, random
# features, uneven micro batches.
DEMANDING: dict[str, Any] = dict(
    transfer__epochs=6,
    transfer__max_tokens=None,
    transfer__batch_size=4,
    transfer__micro_batch_size=2,
    transfer__lr=1.0,
    transfer__clip_norm=0.5,
    transfer__schedule=Plateau(patience=1, factor=0.5).model_dump(),
    transfer__eval_every=1,
    transfer__early_stopping=3,
)
PERFORMER = dict(mixer__feature_map=dict(type="performer", rotation="none"), transfer__lr=0.02)
KAIMING = dict(mixer__feature_map=dict(type="hedgehog", init="kaiming"))
TEACHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny.llama(layers=4).double(),
    "gpt2": lambda: tiny.gpt2(n_layer=4).double(),
}


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of activations with one pass of rows each."""
    monkeypatch.setattr(blockwise, "FILE_BYTES", 1)


class Interrupted(Exception):
    pass


def saved(teacher: PreTrainedModel, folder: Path) -> str:
    teacher.save_pretrained(folder, max_shard_size="60KB")
    return str(folder)


def transfer_by_block(model: str, recipe: Recipe, size: int, folder: Path, **fields: Any) -> BlockwiseTransfer:
    config = recipe.override({"transfer.layers_per_block": size}).transfer
    assert config is not None
    shape = TeacherShape.from_config(json.loads((Path(model) / "config.json").read_text()))
    chosen = dict(dtype=torch.float64, device=CPU, seed=recipe.seed, train_rows=TRAIN, validation_rows=VALIDATION)
    return BlockwiseTransfer(model, resolve(recipe, shape), config, folder=folder, **(chosen | fields))


def joint(model: str, recipe: Recipe, folder: Path, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What all layers at once learn."""
    student = linearize.convert(load_model(model, dtype=dtype, device=CPU), recipe)
    attention_transfer(student, TRAIN, VALIDATION, recipe.transfer, output_dir=folder, seed=recipe.seed)
    return load_file(folder / "trained.safetensors")


def result(stage: Path) -> dict[str, Any]:
    """result.json without what two equal stages differ in."""
    found = json.loads((stage / "result.json").read_text())
    return {
        key: value for key, value in found.items() if key not in ("identity", "seconds", "sha256", "tensors_sha256")
    }


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Nested data with the same keys in the same order, and the same numbers."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_close(found[key], value, tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)
    else:
        assert found == expected


def assert_same(found: Path, expected: Path, tolerance: float = 1e-10) -> None:
    tensors = [load_file(stage / "trained.safetensors") for stage in (found, expected)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensor, tensors[1][name], rtol=0, atol=tolerance)
    assert_close(result(found), result(expected), tolerance)
    lines = [tiny.untimed_metrics(stage) for stage in (found, expected)]
    assert len(lines[0]) == len(lines[1])
    for ours, theirs in zip(*lines, strict=True):
        assert_close(ours, theirs, 100 * tolerance)


# --- the same as all at once ------------------------------------------------------------------------------------------


QUICK = {("llama", "kaiming", 1), ("gpt2", "performer", 3)}
EQUAL = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow, id="-".join(map(str, case)))
    for case in product(TEACHERS, ("kaiming", "performer"), (1, 2, 3))
]


@pytest.mark.parametrize(("name", "mixer", "size"), EQUAL)
def test_block_by_block_is_all_at_once(name: str, mixer: str, size: int, tmp_path: Path) -> None:
    parts = {"kaiming": KAIMING, "performer": PERFORMER}[mixer]
    model, recipe = saved(TEACHERS[name](), tmp_path / "model"), tiny.recipe(**(DEMANDING | parts), seed=2)
    joint(model, recipe, tmp_path / "joint")
    made = transfer_by_block(model, recipe, size, tmp_path / "by block")
    made.train(range(len(made.blocks)))
    made.merge()
    assert_same(made.folder, tmp_path / "joint")
    stages = {f"block-{index:03d}" for index in range(len(made.blocks))}
    files = {"metrics.jsonl", "result.json", "trained.safetensors"}
    assert {path.name for path in made.folder.iterdir()} == stages | files


def test_heads_with_mixers_of_their_own(tmp_path: Path) -> None:
    """Block by block they learn what they learn all at once; heads without parameters stand among them."""
    short = {"span": {"type": "sliding", "window_size": 3}, "feature_map": None, "combine": {"type": "window_only"}}
    heads = [{"kv_heads": ["0.1", "2.0"], "mixer": None}, {"kv_heads": ["1.0"], "mixer": short}]
    recipe = tiny.recipe(**(DEMANDING | KAIMING | {"heads": heads}), seed=2)
    model = saved(TEACHERS["llama"](), tmp_path / "model")
    learned = joint(model, recipe, tmp_path / "joint")
    assert any(".groups." in name for name in learned)
    made = transfer_by_block(model, recipe, 2, tmp_path / "by block")
    made.train(range(len(made.blocks)))
    made.merge()
    assert_same(made.folder, tmp_path / "joint")


def test_the_comparison_is_demanding(tmp_path: Path) -> None:
    """Layers reduce their learning rates and stop at different steps, and are clipped."""
    model = saved(TEACHERS["llama"](), tmp_path / "model")
    joint(model, tiny.recipe(**(DEMANDING | KAIMING), seed=2), tmp_path / "joint")
    steps = [line for line in tiny.untimed_metrics(tmp_path / "joint") if line["event"] == "step"]
    lasts = {name: line["step"] for line in steps for name in line["units"]}
    assert len(lasts) == 4 and len(set(lasts.values())) > 1
    assert any(len({unit["lr"] for unit in line["units"].values()}) > 1 for line in steps)
    assert any(unit["grad_norm"] > 0.5 for line in steps for unit in line["units"].values())


def test_in_single_precision_and_with_layers_that_stay_softmax(tmp_path: Path) -> None:
    model = saved(tiny.llama(layers=5), tmp_path / "model")
    recipe = tiny.recipe(**(DEMANDING | dict(transfer__early_stopping=None, transfer__epochs=2)), **KAIMING)
    recipe = recipe.override({"layers.keep_softmax": [1, 2]})
    joint(model, recipe, tmp_path / "joint", torch.float32)
    made = transfer_by_block(model, recipe, 2, tmp_path / "by 2", dtype=torch.float32)
    made.train(range(3))
    made.merge()
    assert_same(made.folder, tmp_path / "joint", tolerance=1e-6)
    assert transfer_errors(made.folder, 5) == pytest.approx(transfer_errors(tmp_path / "joint", 5), rel=1e-6)

    teacher = load_model(model, dtype=torch.float32, device=CPU)
    student, expected = (convert_layers(teacher, made.plan) for _ in range(2))
    load_transferred(student, made.config, made.folder)
    load_transferred(expected, made.config, tmp_path / "joint")
    for name, tensor in tiny.snapshot(student).items():
        torch.testing.assert_close(tensor, tiny.snapshot(expected)[name], rtol=0, atol=1e-6)


def test_with_calibration_and_with_every_loss(tmp_path: Path) -> None:
    losses = dict(transfer__weight_cross_entropy=1.0, transfer__calibration_tokens=100)
    mixer = dict(mixer__feature_map=dict(type="exp"), mixer__combine=dict(type="absolute_scale"))
    model, recipe = saved(TEACHERS["llama"](), tmp_path / "model"), tiny.recipe(**losses, **mixer)
    joint(model, recipe, tmp_path / "joint")
    made = transfer_by_block(model, recipe, 3, tmp_path / "by 3")
    made.train([0, 1])
    made.merge()
    assert_same(made.folder, tmp_path / "joint")


def test_a_block_with_nothing_to_learn(tmp_path: Path) -> None:
    model = saved(TEACHERS["llama"](), tmp_path / "model")
    recipe = tiny.recipe(layers__keep_softmax=[0, 1])
    joint(model, recipe, tmp_path / "joint")
    made = transfer_by_block(model, recipe, 2, tmp_path / "by 2")
    made.train([0, 1])
    assert made.unfinished() == []
    made.merge()
    assert_same(made.folder, tmp_path / "joint")


def test_nothing_to_learn_at_all(tmp_path: Path) -> None:
    fixed = dict(mixer__feature_map=dict(type="elu1"), mixer__span=dict(type="none"), mixer__combine=dict(type="add"))
    model = saved(TEACHERS["llama"](), tmp_path / "model")
    made = transfer_by_block(model, tiny.recipe(**fixed), 2, tmp_path / "by 2")
    made.train([0, 1])
    with pytest.raises(UserError, match="expected mixers with parameters to train, found none"):
        made.merge()


# --- each block a job of its own --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_blocks_in_processes_of_their_own_and_in_any_order(tmp_path: Path) -> None:
    """Two at the same time, then the first: they share nothing but the folder."""
    model, recipe = saved(TEACHERS["llama"](), tmp_path / "model"), tiny.recipe(**(DEMANDING | PERFORMER))
    joint(model, recipe, tmp_path / "joint")
    made = transfer_by_block(model, recipe, 2, tmp_path / "by 2")
    code = "import sys; from tests.training import test_blockwise; test_blockwise.one_block(*sys.argv[1:])"
    paths = [str(Path(linearize.__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([sys.executable, "-c", code, model, made.folder, str(index)], env=environment)
        for index in (1, 0)
    ]
    assert [child.wait() for child in children] == [0, 0]
    assert (made.folder / "activations").is_dir()
    assert made.unfinished() == []
    made.merge()
    assert_same(made.folder, tmp_path / "joint")


def one_block(model: str, folder: str, index: str) -> None:
    """The body of a child process."""
    blockwise.FILE_BYTES = 1
    transfer_by_block(model, tiny.recipe(**(DEMANDING | PERFORMER)), 2, Path(folder)).train([int(index)])


def test_what_is_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = saved(TEACHERS["llama"](), tmp_path / "model"), tiny.recipe()
    load_block, loaded = blockwise.load_block, []

    def counted(name: str, layers: range, **options: Any) -> PreTrainedModel:
        loaded.append(layers.start)
        return load_block(name, layers, **options)

    monkeypatch.setattr(blockwise, "load_block", counted)

    def job() -> BlockwiseTransfer:
        return transfer_by_block(model, recipe, 1, tmp_path / "by 1")

    assert job().unfinished() == [0, 1, 2, 3]
    job().train([2])
    assert job().unfinished() == [0, 1, 3]
    assert {path.name for path in (job().folder / "activations").iterdir()} == {"boundary-001", "boundary-002"}
    with pytest.raises(UserError, match="block-000: expected a finished block, found none"):
        job().merge()
    for index in (3, 0, 1):
        job().train([index])
    assert loaded == [0, 1, 2, 2, 3, 0, 1]  # before a block, only those that make what enters it and was not there yet
    assert job().unfinished() == []
    job().merge()
    assert not (job().folder / "activations").exists()
    assert job().unfinished() == []
    joint(model, recipe, tmp_path / "joint")
    assert_same(job().folder, tmp_path / "joint")


def test_the_same_again_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = saved(TEACHERS["llama"](), tmp_path / "model"), tiny.recipe()
    made = transfer_by_block(model, recipe, 2, tmp_path / "by 2")
    made.train([0, 1])

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a block was loaded")

    monkeypatch.setattr(blockwise, "load_block", loaded)
    made.train([0, 1])
    made.merge()
    before = (made.folder / "result.json").read_bytes()
    made.train([0, 1])
    made.merge()
    assert (made.folder / "result.json").read_bytes() == before


@pytest.mark.parametrize("at", [3, 9], ids=["the first block", "the second block"])
def test_a_killed_block_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    model = saved(TEACHERS["llama"](), tmp_path / "model")
    recipe = tiny.recipe(**(DEMANDING | dict(transfer__early_stopping=None, transfer__epochs=3)), **KAIMING)
    joint(model, recipe, tmp_path / "joint")
    made = transfer_by_block(model, recipe, 2, tmp_path / "by 2")
    update, steps = loop.StageRun.update, []

    def counted(self: Any) -> Any:
        steps.append(self.step)
        if len(steps) == at:
            raise Interrupted
        return update(self)

    monkeypatch.setattr(loop.StageRun, "update", counted)
    with pytest.raises(Interrupted):
        made.train([0, 1])
    made.train([0, 1])
    made.merge()
    assert len(steps) == 2 * 6 + 1  # once more the step at which it was killed, right behind a checkpoint
    assert_same(made.folder, tmp_path / "joint", tolerance=0.0)


def test_activations_that_were_being_written_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recipe = saved(TEACHERS["llama"](), tmp_path / "model"), tiny.recipe()
    made = transfer_by_block(model, recipe, 2, tmp_path / "by 2")
    save_file, calls = activations.save_file, []

    def killed(*arguments: Any, **options: Any) -> None:
        calls.append(arguments[1])
        if len(calls) == 2:
            raise Interrupted
        save_file(*arguments, **options)

    monkeypatch.setattr(activations, "save_file", killed)
    with pytest.raises(Interrupted):
        made.train([1])
    boundary = made.folder / "activations" / "boundary-001"
    assert [path.name for path in boundary.iterdir()] == ["train-00000.safetensors"]
    made.train([1])
    assert len(calls) == 2 + 2 + 1  # 10 rows by 4 in three files, of which one was there; 3 held-out rows in one
    names = {f"train-{number:05d}.safetensors" for number in range(3)} | {"validation-00000.safetensors"}
    assert {path.name for path in boundary.iterdir()} == names


# --- what is in memory and on disk ------------------------------------------------------------------------------------


def test_one_block_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(TEACHERS["llama"](), tmp_path / "model")
    load_block, alive, loaded = blockwise.load_block, [], []

    def watched(name: str, layers: range, **options: Any) -> PreTrainedModel:
        assert [tensor for tensor in alive if tensor() is not None] == []
        block = load_block(name, layers, **options)
        loaded.append(layers)
        alive.extend(weakref.ref(parameter) for parameter in block.parameters())
        return block

    def converted(block: PreTrainedModel, *arguments: Any, **options: Any) -> PreTrainedModel:
        student = convert_layers(block, *arguments, **options)  # parameters of its own, of the same storage
        alive.extend(weakref.ref(parameter) for parameter in student.parameters())
        return student

    monkeypatch.setattr(blockwise, "load_block", watched)
    monkeypatch.setattr(blockwise, "convert_layers", converted)
    made = transfer_by_block(model, tiny.recipe(), 1, tmp_path / "by 1")
    made.train(range(4))
    assert loaded == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]  # once each, to train and to hand on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TEACHERS)
def test_activations_are_the_residual_stream_of_the_whole_model(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """As it leaves the layer before, not normalised, in the model's dtype; of every row, in order."""
    model = saved(TEACHERS[name](), tmp_path / "model")
    whole: Any = load_model(model, dtype=dtype, device=CPU)
    made = transfer_by_block(model, tiny.recipe(), 1, tmp_path / "by 1", dtype=dtype)
    made.train([2])
    for side, rows in (("train", TRAIN), ("validation", VALIDATION)):
        with torch.no_grad():
            inputs = dict(input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False)
            expected = whole(**inputs, output_hidden_states=True).hidden_states
        for boundary in (1, 2):
            files = sorted((made.folder / "activations" / f"boundary-{boundary:03d}").glob(f"{side}-*"))
            stream = torch.cat([load_file(file)["residual_stream"] for file in files])
            assert stream.dtype == dtype
            size = expected[boundary].abs().max().item()
            tolerance = 1e-6 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(stream, expected[boundary], rtol=0, atol=tolerance * size)


def test_rows_are_read_one_by_one(tmp_path: Path) -> None:
    """Of rows in any order, as an epoch shuffles them."""
    stream = torch.arange(7 * 2 * 3.0).view(7, 2, 3)
    stored = activations.Activations(tmp_path / "boundary", "train", 7, 3, {"data": "a"})
    assert not stored.complete
    stored.write(lambda rows: stream[rows], row_bytes=24)
    assert stored.complete
    for rows in ([5, 0, 6, 2, 1, 4, 3], [3], [0, 1, 2, 3, 4, 5, 6]):
        assert torch.equal(stored.read(rows), stream[rows])
    packed = tiny.packed([[2]] * 7)
    numbers = torch.arange(7)
    all_rows = activations.StoredRows(packed.input_ids, packed.position_ids, packed.labels, stored, numbers)
    chosen = all_rows.rows([6, 2, 4]).rows(slice(1, 3))
    assert torch.equal(chosen.input_ids, packed.input_ids[[2, 4]])
    assert torch.equal(chosen.inputs()["inputs_embeds"], stream[[2, 4]])
    assert "input_ids" not in chosen.inputs()


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> BlockwiseTransfer:
    model = saved(TEACHERS["llama"](), tmp_path / "model")
    return transfer_by_block(model, tiny.recipe(), 2, tmp_path / "by 2")


def test_too_little_room_for_activations(job: BlockwiseTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(
        UserError, match=r"expected room for 122880 bytes of activations .*, found 1000 free; free some"
    ):
        job.train([1])
    monkeypatch.undo()
    job.train([1])


def test_a_disk_that_becomes_full(job: BlockwiseTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(activations, "save_file", full)
    with pytest.raises(UserError, match="the disk is full: expected room for 49152 bytes"):
        job.train([1])
    assert list((job.folder / "activations" / "boundary-001").iterdir()) == []


def other_rows(job: BlockwiseTransfer) -> BlockwiseTransfer:
    return dataclasses.replace(job, train_rows=tiny.packed([[48]] * 10, seed=9))


def other_dtype(job: BlockwiseTransfer) -> BlockwiseTransfer:
    return dataclasses.replace(job, dtype=torch.float32)


@pytest.mark.parametrize("change, field", [(other_rows, "data"), (other_dtype, "dtype")])
def test_activations_of_another_run(
    job: BlockwiseTransfer, change: Callable[[BlockwiseTransfer], BlockwiseTransfer], field: str
) -> None:
    job.train([1])
    trained = job.folder / "block-001"
    trained.rename(job.folder / "elsewhere")
    with pytest.raises(UserError, match=f"belongs to another run: expected {field} = .*, found {field} = .*"):
        change(job).train([1])


def test_a_block_of_another_run(job: BlockwiseTransfer) -> None:
    job.train([0, 1])
    with pytest.raises(
        UserError, match=r"block-000/result.json: belongs to another run: expected seed = 5, found seed"
    ):
        dataclasses.replace(job, seed=5).merge()


def test_activations_that_cannot_be_read(job: BlockwiseTransfer) -> None:
    job.train([1])
    file = job.folder / "activations" / "boundary-001" / "train-00001.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    (job.folder / "block-001").rename(job.folder / "elsewhere")
    with pytest.raises(UserError, match=re.escape(f"{file}: expected activations between blocks, found no such file")):
        job.train([1])


# --- metrics ----------------------------------------------------------------------------------------------------------


def line(event: str, step: int, seconds: float, **losses: float) -> dict[str, Any]:
    units = {name: {"loss": loss} for name, loss in losses.items()}
    about = {"event": event, "step": step, "tokens": 10 * step, "seconds": seconds}
    found = about | {"loss": sum(losses.values()) / len(losses), "units": units}
    return found | ({"tokens_per_second": 60.0} if event == "step" else {})


def test_merged_metrics() -> None:
    first = [line("evaluation", 0, 1.0, a=4.0, b=2.0), line("step", 1, 2.0, a=1.0, b=1.0)]
    first.append(line("evaluation", 1, 3.0, a=6.0, b=6.0))
    second = [line("evaluation", 0, 1.0, c=9.0), line("step", 1, 2.0, c=4.0), line("evaluation", 1, 3.0, c=3.0)]
    second += [line("step", 2, 4.0, c=1.0), line("evaluation", 2, 5.0, c=0.0)]
    found = list(merged_metrics([first, second]))
    assert [(m["event"], m["step"], m["tokens"]) for m in found] == [
        ("evaluation", 0, 0),
        ("step", 1, 10),
        ("evaluation", 1, 10),
        ("step", 2, 20),
        ("evaluation", 2, 20),
    ]
    assert [m["loss"] for m in found] == [5.0, 2.0, 5.0, 1.0, 4.0]
    assert [m["seconds"] for m in found] == [2.0, 4.0, 6.0, 7.0, 8.0]
    assert [list(m["units"]) for m in found] == [["a", "b", "c"]] * 3 + [["c"], ["a", "b", "c"]]
    assert [m.get("tokens_per_second") for m in found] == [None, pytest.approx(30.0), None, pytest.approx(60.0), None]


# --- jobs that share a folder -----------------------------------------------------------------------------------------


def test_jobs_take_blocks_that_no_other_has_taken(tmp_path: Path) -> None:
    """One that another trains is left out, or refused where it is asked for; the claims are gone at the end."""
    model, recipe = saved(TEACHERS["llama"](), tmp_path / "model"), tiny.recipe(**KAIMING)
    joint(model, recipe, tmp_path / "joint")
    made = transfer_by_block(model, recipe, 1, tmp_path / "by block")
    (made.folder / "claims").mkdir(parents=True)
    with claimed(made.folder / "claims" / "block-001"):
        made.train_unclaimed()
        assert made.unfinished() == [1]
        with pytest.raises(UserError, match="block 1: expected one that no job trains, found another job at it"):
            made.train(range(4))
    made.train_unclaimed()
    made.merge()
    assert_same(made.folder, tmp_path / "joint")


@pytest.mark.slow
def test_two_jobs_and_one_that_is_killed(tmp_path: Path) -> None:
    """Both take what is free; when one dies, the other's command, given again, trains what is left; no block twice."""
    folder, model = tmp_path / "run", saved(tiny.llama(layers=6), tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(model)
    arguments = tiny.run_arguments(folder, transfer__layers_per_block=1)
    arguments[arguments.index("--model") + 1] = model
    command = [sys.executable, "-m", "linearize", *arguments, "--block", "any"]
    environment = os.environ | {"PYTHONPATH": str(Path(linearize.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    jobs = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    deadline = time.monotonic() + 120
    while not list(folder.glob("transfer/block-*/checkpoint-*")):
        assert time.monotonic() < deadline and jobs[0].poll() is None
        time.sleep(0.01)
    jobs[0].kill()
    said = [job.communicate(timeout=120)[1] for job in jobs]
    assert jobs[1].returncode == 0, said[1]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "unfinished blocks: none" in done.stderr
    begun = re.findall(r"block (\d) of 6: step 0 ", "".join([*said, done.stderr]))
    assert sorted(begun) == list("012345")
