"""A student is an ordinary model of transformers: files, the hub, devices, the compiler, pipelines."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model, init_empty_weights
from accelerate.hooks import attach_align_device_hook_on_blocks
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import linearize
from linearize.base import UserError
from linearize.hf.attention import linearized_layers
from linearize.hf.classes import MODEL_CLASSES
from linearize.hf.convert import to_softmax
from linearize.mixers.linear import LinearMixer
from tests.byte_tokenizer import byte_tokenizer
from tests.hf import encoders
from tests.hf.checks import assert_close, left_padding, positions, uncached
from tests.hf.decoders import ARCHITECTURES as OTHERS
from tests.hf.models import (
    ARCHITECTURES,
    CASE,
    MIXER_CASES,
    Case,
    make_student,
    make_teacher,
    random_tokens,
    student_of,
    teacher_of,
)

# Purely linear, a window beside a softmax layer, and a base that is another in all respects.
SOME = [CASE["llama-none"], CASE["llama-mixed"], CASE["gpt2-sliding"]]
EACH = pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
# Every kind of part that a mixer can have.
KINDS = [case for case in MIXER_CASES if case.architecture == "llama"]
FORMATS = Path(__file__).parent / "checkpoints"


def saved(case: Case, folder: Path, **options: Any) -> Path:
    copy.deepcopy(student_of(case)).save_pretrained(folder, **options)
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **(dict(dtype=torch.float64) | options))


def outputs(model: PreTrainedModel, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


# --- files ------------------------------------------------------------------------------------------------------------


def assert_in_shards(student: PreTrainedModel, folder: Path, inputs: dict[str, Tensor]) -> None:
    expected = outputs(student, **inputs)
    student.save_pretrained(folder, max_shard_size="40KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert len({*index["weight_map"].values()}) == len(list(folder.glob("*.safetensors"))) > 1
    auto = next(name for name in student.config.auto_map if name != "AutoConfig")
    again = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float64)
    if hasattr(student.config, "num_experts_per_tok"):
        again.set_experts_implementation("eager")  # the other knows no fp64
    assert_close(outputs(again, **inputs), expected)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *OTHERS])
def test_decoders_in_shards(architecture: str, tmp_path: Path) -> None:
    student = copy.deepcopy(student_of(Case("", architecture, convert_sliding=True)))
    assert_in_shards(student, tmp_path, dict(input_ids=random_tokens(2, 12)))


@pytest.mark.parametrize("architecture", encoders.ENCODERS)
def test_encoders_in_shards(architecture: str, tmp_path: Path) -> None:
    student = copy.deepcopy(encoders.student_of(encoders.Case(architecture)))
    assert_in_shards(student, tmp_path, encoders.inputs_of(architecture))


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_format_1_is_read(name: str) -> None:
    """What was written long ago (`write_format_1.py`) means what it meant."""
    folder = FORMATS / "format_1" / name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["linearize"]["format_version"] == 1
    auto = next(name for name in config["auto_map"] if name != "AutoConfig")
    model, report = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert len(linearized_layers(model)) == len(config["linearize"]["layers"]) - 1
    expected = load_file(folder / "expected.safetensors")
    assert_close(outputs(model, input_ids=expected["ids"]), expected["logits"], 1e-9)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_saved_where_a_wrapper_made_another_class_of_it(tmp_path: Path) -> None:
    """FSDP2 does; what is saved is what loads without it."""
    student, ids = copy.deepcopy(student_of(SOME[1])), random_tokens(2, 12)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(student, mesh=mesh, ignored_params={p for n, p in student.named_parameters() if ".mixer." in n})
        assert type(student) is not type(student_of(SOME[1]))
        whole = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True))
        student.save_pretrained(tmp_path, state_dict=whole)
    finally:
        torch.distributed.destroy_process_group()
    again = loaded(tmp_path)
    assert type(again) is type(student_of(SOME[1]))
    assert_close(uncached(again, ids), uncached(student_of(SOME[1]), ids))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that is a folder; nothing else of it is asked."""
    folder = tmp_path / "hub"

    def create_commit(api: HfApi, repo_id: str, operations: list[CommitOperationAdd], **options: Any) -> str:
        for operation in operations:
            (folder / repo_id).mkdir(parents=True, exist_ok=True)
            shutil.copy(str(operation.path_or_fileobj), folder / repo_id / operation.path_in_repo)
        return "committed"

    monkeypatch.setattr(HfApi, "create_repo", lambda api, repo_id, **options: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(ModelCard, "load", lambda *args, **kwargs: ModelCard("a card"))
    return folder


@EACH
@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained"])
def test_push_to_hub(how: str, case: Case, hub: Path, tmp_path: Path) -> None:
    """What would be uploaded is all that loading takes."""
    student = copy.deepcopy(student_of(case))
    if how == "push_to_hub":
        assert student.push_to_hub("me/student") == "committed"
    else:
        student.save_pretrained(tmp_path / "student", push_to_hub=True, repo_id="me/student")
    uploaded = hub / "me" / "student"
    files = {path.name for path in uploaded.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "modeling_linearize.py"} <= files
    config = json.loads((uploaded / "config.json").read_text(encoding="utf-8"))
    for reference in config["auto_map"].values():
        module, _, name = reference.partition(".")
        assert name in (uploaded / f"{module}.py").read_text(encoding="utf-8")
    ids = random_tokens(2, 12)
    assert_close(uncached(loaded(uploaded), ids), uncached(student, ids))


# --- devices ----------------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"], ids=str)
def test_device_map(device_map: Any, case: Case, tmp_path: Path) -> None:
    model, ids = loaded(saved(case, tmp_path), device_map=device_map), random_tokens(2, 20)
    assert_close(uncached(model, ids), uncached(student_of(case), ids))


def on_disk(model: PreTrainedModel, layers: set[int]) -> dict[str, str]:
    """A device map with these layers on disk and all else in memory."""
    blocks = {name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules}
    places = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if name in blocks:
            places[name] = "disk" if int(name.rpartition(".")[2]) in layers else "cpu"
        elif not inside and not list(module.children()):
            places[name] = "cpu"
    return places


@pytest.mark.parametrize("case", [*SOME, *KINDS], ids=lambda case: case.name)
def test_layers_on_disk(case: Case, tmp_path: Path) -> None:
    """accelerate brings their weights for a forward, and takes them away again."""
    student, ids = student_of(case), random_tokens(2, 20)
    places = on_disk(student, {0})
    model = loaded(saved(case, tmp_path), device_map=places, offload_folder=tmp_path / "offload")
    layer = next(iter(linearized_layers(model).values()))
    assert next(p for name, p in layer.named_parameters() if not name.startswith("mixer.")).is_meta
    assert_close(uncached(model, ids), uncached(student, ids))
    settings = dict(max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, **settings), student.generate(ids, **settings))
    with linearize.softmax_attention(model):
        assert_close(uncached(model, ids), uncached(teacher_of(case), ids))
    assert_close(uncached(model, ids), uncached(student, ids))
    with pytest.warns(UserWarning, match="save a model with offloaded modules"):
        model.save_pretrained(tmp_path / "again")
    assert_close(uncached(loaded(tmp_path / "again"), ids), uncached(student, ids))


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("case", [*SOME, *KINDS], ids=lambda case: case.name)
def test_a_model_that_is_offloaded_after_it_was_loaded(case: Case, place: str, tmp_path: Path) -> None:
    """By accelerate's own functions, with no `device_map`."""
    student, ids = student_of(case), random_tokens(2, 20)
    model = copy.deepcopy(student)
    if place == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path / "offload"), execution_device=torch.device("cpu"))
    assert_close(uncached(model, ids), uncached(student, ids))
    settings = dict(max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, **settings), student.generate(ids, **settings))


@pytest.mark.parametrize("case", [*SOME, *KINDS], ids=lambda case: case.name)
def test_a_teacher_that_accelerate_spreads_over_devices(case: Case) -> None:
    """Its hooks stay with the student, and call the linearized layers."""
    teacher, ids = copy.deepcopy(teacher_of(case)), random_tokens(2, 20)
    dispatch_model(teacher, on_disk(teacher, set()), main_device="cpu", force_hooks=True)
    model, student = make_student(case, teacher), student_of(case)
    assert_close(uncached(model, ids), uncached(student, ids))
    settings = dict(max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(ids, **settings), student.generate(ids, **settings))
    for softmax in (teacher, to_softmax(model)):
        assert_close(uncached(softmax, ids), uncached(teacher_of(case), ids))


@EACH
@pytest.mark.parametrize("place", ["cpu_offload", "disk_offload", "device_map"])
def test_a_teacher_that_is_offloaded(case: Case, place: str, tmp_path: Path) -> None:
    teacher, device = copy.deepcopy(teacher_of(case)), torch.device("cpu")
    if place == "cpu_offload":
        cpu_offload(teacher, execution_device=device)
    elif place == "disk_offload":
        disk_offload(teacher, str(tmp_path), execution_device=device)
    else:
        teacher.save_pretrained(tmp_path)
        teacher = loaded(tmp_path, device_map=on_disk(teacher, {1}), offload_folder=tmp_path / "offload")
    with pytest.raises(UserError, match=r"^model: expected all weights in memory, found .* offloaded .*convert it and"):
        linearize.convert(teacher, case.recipe())


def test_mixers_lie_where_their_layers_do() -> None:
    """`meta` is another device."""
    teacher = copy.deepcopy(teacher_of(CASE["llama-sliding"]))
    teacher.model.layers[1].to("meta")
    layers = linearized_layers(linearize.convert(teacher, CASE["llama-sliding"].recipe())).values()
    places = [{x.device.type for x in layer.parameters()} for layer in layers]
    assert places == [{"cpu"}, {"meta"}, {"cpu"}]


def test_mixers_on_disk_stay_in_fp32(tmp_path: Path) -> None:
    places = on_disk(student_of(SOME[0]), {0})
    folder = saved(SOME[0], tmp_path)
    model = loaded(folder, device_map=places, offload_folder=tmp_path / "offload", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".mixer." in name else torch.bfloat16)
    ids = random_tokens(2, 20)
    assert torch.equal(uncached(model, ids), uncached(loaded(folder, dtype=torch.bfloat16), ids))


@pytest.mark.parametrize("case", SOME[:2], ids=lambda case: case.name)
def test_what_a_layer_on_another_device_is_handed_lies_there(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device map spreads layers, accelerate moves what goes from one to the next; `meta` is such a device."""
    model = copy.deepcopy(student_of(case))
    seen = []

    def spy(mixer: nn.Module, inputs: Any, layout: Any) -> Tensor:
        tensors = [inputs.q, *mixer.parameters(), layout.key_position, layout.key_document]
        seen.append({x.device.type for x in tensors})
        return inputs.q

    monkeypatch.setattr(LinearMixer, "forward", spy)
    devices = dict.fromkeys(on_disk(model, set()), "cpu") | {"model.layers.2": "meta", "model.norm": "meta"}
    offload = dict.fromkeys(devices, False)
    attach_align_device_hook_on_blocks(model, execution_device={"": "cpu"} | devices, offload=offload)
    ids, mask = random_tokens(2, 20), left_padding([6, 0], 20)
    model.model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
    assert seen == [{"cpu"}] * (len(linearized_layers(model)) - 1) + [{"meta"}]


@EACH
@pytest.mark.parametrize("context", [lambda: torch.device("meta"), lambda: init_empty_weights(include_buffers=True)])
def test_made_without_memory(context: Any, case: Case) -> None:
    """A skeleton on `meta`, filled afterwards."""
    student = student_of(case)
    with context():
        model: Any = type(student)(copy.deepcopy(student.config)).double()
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    model.load_state_dict(student.state_dict(), assign=True)
    # What no checkpoint holds is the base's own, such as the angles of RoPE.
    for name, buffer in student.named_buffers():
        if model.get_buffer(name).is_meta:
            assert ".mixer." not in name
            around, _, last = name.rpartition(".")
            setattr(model.get_submodule(around), last, buffer)
    ids = random_tokens(2, 20)
    assert_close(uncached(model.eval(), ids), uncached(student, ids))


@pytest.mark.parametrize("case", [*KINDS, CASE["gpt2-mixed"]], ids=lambda case: case.name)
def test_nothing_is_left_without_a_value(case: Case, tmp_path: Path) -> None:
    """Loading makes the model on `meta`. A teacher's folder has no weights for mixers, which are initialised."""
    teacher = copy.deepcopy(teacher_of(case)).float()
    teacher.save_pretrained(tmp_path)
    student = linearize.convert(teacher, case.recipe())
    model: Any = type(student).from_pretrained(tmp_path, config=student.config, dtype=torch.float32)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= model.state_dict()  # tied ones by both of their names
    assert not any(x.is_meta for x in tensors.values())
    assert all(x.isfinite().all() for x in tensors.values())
    for name, x in student.state_dict().items():
        if ".mixer." in name:
            scale = x.double().abs().mean().item()
            assert tensors[name].double().abs().mean().item() == pytest.approx(scale, rel=0.5)
    assert uncached(model, random_tokens(2, 12)).isfinite().all()


# --- compiling --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled() -> None:
    """Logits and gradients, with padding and without. A compiled step of generation is in `test_generation`."""
    command = [sys.executable, "-m", "tests.hf.compiled_forward", *(case.name for case in SOME)]
    done = subprocess.run(command, cwd=FORMATS.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal"


# --- pipelines --------------------------------------------------------------------------------------------------------

TEXT = "one two three"
TASKS: dict[str, tuple[str, str]] = {
    "text-generation": ("llama", "AutoModelForCausalLM"),
    "text-classification": ("gpt2", "AutoModelForSequenceClassification"),
    "token-classification": ("llama", "AutoModelForTokenClassification"),
    "feature-extraction": ("llama", "AutoModel"),
    "fill-mask": ("bert", "AutoModelForMaskedLM"),
    "image-classification": ("vit", "AutoModelForImageClassification"),
}


def rounded(answer: Any) -> Any:
    return json.loads(json.dumps(answer, default=float), parse_float=lambda digits: round(float(digits), 9))


@pytest.mark.parametrize("task", TASKS)
def test_pipelines(task: str, tmp_path: Path) -> None:
    """By the folder alone they give what they give for the student itself, and within `softmax_attention` do not."""
    architecture, auto = TASKS[task]
    tokenizer = byte_tokenizer()
    if architecture in encoders.ENCODERS:
        base = MODEL_CLASSES[f"linearized_{architecture}"][auto][0].__bases__[-1].__name__
        head = base.removeprefix(encoders.ENCODERS[architecture][0])
        sizes = {} if architecture == "vit" else dict(vocab_size=len(tokenizer) + 1, pad_token_id=0)
        teacher = encoders.make_encoder(architecture, head, **sizes)
        student = linearize.convert(teacher, encoders.Case(architecture).recipe())
    else:
        teacher = make_teacher(architecture, auto.removeprefix("AutoModel"), vocab_size=len(tokenizer))
        student = make_student(Case("", architecture), teacher)
    data: Any = TEXT
    if task == "image-classification":
        import PIL.Image

        data = PIL.Image.new("RGB", (16, 16), (200, 30, 90))
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    else:
        if task == "fill-mask":
            tokenizer.add_special_tokens({"mask_token": "<mask>"})
            data = "one <mask> three"
        tokenizer.save_pretrained(tmp_path)
    student.save_pretrained(tmp_path)
    options = dict(max_new_tokens=4, do_sample=False) if task == "text-generation" else {}
    pipe = transformers.pipeline(task, model=str(tmp_path), dtype=torch.float64)
    assert type(pipe.model) is type(student)
    found = rounded(pipe(data, **options))
    processor = dict(tokenizer=pipe.tokenizer, image_processor=pipe.image_processor)
    direct = transformers.pipeline(task, model=student, **{k: v for k, v in processor.items() if v is not None})
    assert found == rounded(direct(data, **options))
    with linearize.softmax_attention(pipe.model):
        assert rounded(pipe(data, **options)) != found
