"""The parts of transformers that we rely on without a promise. When one of these fails, read `hf` first."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import (
    AttentionInterface,
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.generation import GenerationMode
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from linearize.hf.architectures import ARCHITECTURES as ALL
from linearize.hf.attention import IMPLEMENTATION, linearized_attention, linearized_layers
from linearize.hf.cache import LinearizedCacheLayer
from linearize.hf.classes import (
    ATTENTION_CLASSES,
    CONFIG_CLASSES,
    MODEL_CLASSES,
    LinearizedModel,
)
from linearize.hf.keywords import LAYOUT
from tests.hf.checks import left_padding
from tests.hf.decoders import ARCHITECTURES as OTHERS
from tests.hf.encoders import ENCODERS, make_encoder
from tests.hf.models import ARCHITECTURES, CASES, Case, make_student, make_teacher, random_tokens, student_of

SLIDING, MIXED = CASES[1], CASES[5]


DECODERS = (*ARCHITECTURES, *OTHERS)
EVERY = pytest.mark.parametrize("architecture", DECODERS)


@EVERY
def test_attention_classes(architecture: str) -> None:
    """Their class can be swapped, and they find the function, the cache and their place where we look for them."""
    base, linearized = ALL[architecture].attention, ATTENTION_CLASSES[architecture]
    module = next(m for m in make_teacher(architecture).modules() if isinstance(m, base))
    module.__class__ = linearized
    assert linearized.__mro__[2] is base
    assert module.layer_idx == 0
    parameters = inspect.signature(base.forward).parameters
    assert linearized.cache_argument == ("layer_past" if architecture == "gpt_neox" else "past_key_values")
    assert linearized.cache_argument in parameters
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert callable(sys.modules[base.__module__].eager_attention_forward)
    assert set(ALL[architecture].projections) <= set(dict(module.named_children()))
    assert linearized.arguments[0] == "hidden_states"
    assert ("use_rope" in vars(module)) == (architecture == "smollm3")


@EVERY
def test_parts_of_base_models(architecture: str) -> None:
    """Each is where we say, and what runs the layers is handed the mask, positions and cache under these names."""
    parts, base = ALL[architecture].parts, make_teacher(architecture, "Model")
    assert parts is not None
    wanted = {*parts.embeddings, parts.norm, parts.rope, parts.entry, parts.exit} - {None}
    assert all(isinstance(base.get_submodule(path), nn.Module) for path in wanted)
    assert len(base.get_submodule(parts.layers)) == base.config.num_hidden_layers
    assert parts.multiplier is None or isinstance(getattr(base, parts.multiplier), float)
    arguments = inspect.signature(type(base.get_submodule(parts.stack)).forward).parameters
    assert {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values"} <= set(arguments)
    assert (base.get_submodule(parts.stack) is base) == (architecture != "opt")


@pytest.mark.parametrize("architecture", ENCODERS)
def test_attention_classes_of_encoders(architecture: str) -> None:
    """Likewise; a keyword argument of the layer reaches the function, and none of them is causal."""
    base, linearized = ALL[architecture].attention, ATTENTION_CLASSES[architecture]
    module: Any = next(m for m in make_encoder(architecture).modules() if isinstance(m, base))
    assert linearized.__mro__[2] is base and linearized.bidirectional
    assert module.is_causal is False
    assert inspect.signature(base.forward).parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert callable(sys.modules[base.__module__].eager_attention_forward)
    assert linearized.arguments[0] == "hidden_states"


@pytest.mark.parametrize("architecture", [name for name in DECODERS if name not in ("gpt2", "opt")])
def test_rope(architecture: str) -> None:
    """It is one function of the attention class's module, called by its name in the forward that we copy."""
    base = ALL[architecture].attention
    assert "position_embeddings" in inspect.signature(base.forward).parameters
    assert "apply_rotary_pos_emb" in base.forward.__code__.co_names
    assert callable(sys.modules[base.__module__].apply_rotary_pos_emb)


def test_soft_capping_needs_more_than_sdpa() -> None:
    """Older versions leave the cap out without a word; then a model with one is not converted until it is told."""
    q = torch.randn(1, 2, 3, 4)
    if transformers.Gemma2ForCausalLM._supports_sdpa:
        capped, plain = (ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Identity(), q, q, q, None, softcap=x) for x in (3.0, None))
        assert torch.equal(capped[0], plain[0])
    else:
        with pytest.raises(ValueError, match="softcap"):
            ALL_ATTENTION_FUNCTIONS["sdpa"](nn.Identity(), q, q, q, None, softcap=3.0)


def test_what_is_called_otherwise_on_disk() -> None:
    """Experts, which are one tensor in the model; by model type."""
    renamed = {name for name in DECODERS if get_checkpoint_conversion_mapping(name)}
    assert renamed == {"mixtral", "qwen3_moe"}
    assert all(get_checkpoint_conversion_mapping(f"linearized_{name}") for name in renamed)


def test_attention_functions() -> None:
    assert AttentionInterface()[IMPLEMENTATION] is linearized_attention
    assert ALL_ATTENTION_FUNCTIONS.get_interface(IMPLEMENTATION, None) is linearized_attention
    assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", test_attention_functions) is test_attention_functions


def test_the_implementation_is_one_private_attribute_of_the_config() -> None:
    config = make_teacher("llama").config
    assert config._attn_implementation == "sdpa"
    config._attn_implementation_internal = "eager"
    assert config._attn_implementation == "eager"
    assert not any("attn_implementation" in name for name in config.to_dict())


def test_no_mask_is_built_for_our_function() -> None:
    config = make_teacher("llama").config
    embeddings, mask = torch.zeros(1, 5, 32), torch.tensor([[0, 0, 1, 1, 1]])
    options = dict(
        config=config, inputs_embeds=embeddings, attention_mask=mask, past_key_values=None, position_ids=None
    )
    assert create_causal_mask(**options).shape == (1, 1, 5, 5)
    config._attn_implementation_internal = IMPLEMENTATION
    assert create_causal_mask(**options) is None


@EVERY
def test_layers_get_what_a_hook_of_the_base_model_adds(architecture: str) -> None:
    """Keyword arguments reach every attention module, through the models with a head as well."""
    case = Case("", architecture, convert_sliding=True)
    student, seen = make_student(case, make_teacher(architecture)), []
    for layer in linearized_layers(student).values():
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs[LAYOUT]), with_kwargs=True)
    student(random_tokens(1, 6), attention_mask=left_padding([2], 6))
    assert [layout.key_position.tolist() for layout in seen] == student.config.num_hidden_layers * [
        [[-1, -1, 0, 1, 2, 3]]
    ]


def test_cache_layers() -> None:
    """What a cache layer must define; and that ours defines everything that other layers do."""
    required = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    assert CacheLayerMixin.__abstractmethods__ == required
    public = {
        name for cls in (CacheLayerMixin, DynamicLayer, StaticLayer) for name in vars(cls) if not name.startswith("_")
    }
    public.discard("get_max_cache_shape")  # an old name, gone in newer releases, for get_max_length
    assert public - set(vars(LinearizedCacheLayer)) == set()


def test_caches_are_lists_of_layers() -> None:
    assert DynamicCache().layers == []
    cache = DynamicCache(config=student_of(SLIDING).config)
    assert [type(layer) for layer in cache.layers] == 3 * [DynamicLayer]
    assert not any(layer.is_initialized for layer in cache.layers)
    with torch.no_grad():
        student_of(MIXED)(random_tokens(1, 5), past_key_values=cache)
    assert [type(layer) for layer in cache.layers] == [LinearizedCacheLayer, DynamicLayer, LinearizedCacheLayer]
    # Masks are sized after the one softmax layer, as both ways of looking for it find.
    assert cache.is_sliding.count(True) == 0
    assert cache.is_sliding.index(False) == 1
    assert cache.get_seq_length() == 5


def test_generation_prepares_a_cache_through_a_private_method() -> None:
    parameters = list(inspect.signature(GenerationMixin._prepare_cache_for_generation).parameters)
    assert parameters[:4] == ["self", "generation_config", "model_kwargs", "generation_mode"]
    made: list[list[type]] = []

    def forward(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, Cache]) -> None:
        made.append([type(layer) for layer in kwargs["past_key_values"].layers])

    student = make_student(MIXED, make_teacher("llama"))
    student.register_forward_pre_hook(forward, with_kwargs=True)
    student.generate(random_tokens(1, 4), max_new_tokens=1)
    assert made == [[LinearizedCacheLayer, DynamicLayer, LinearizedCacheLayer]]


def test_generation_takes_candidates_back_by_crop() -> None:
    """A negative number of tokens, after it asked for a recording by this name; assistants are told that they are."""
    assert GenerationMode.ASSISTED_GENERATION == "assisted_generation"
    assert GenerationConfig().is_assistant is None
    calls: list[object] = []

    class Spy(DynamicCache):
        def activate_past_recording(self) -> None:
            calls.append("recording")
            super().activate_past_recording()

        def crop(self, tokens_to_remove: int) -> None:
            calls.append(tokens_to_remove)
            super().crop(tokens_to_remove)

    ids = random_tokens(1, 6).repeat(1, 2)
    make_teacher("llama").generate(ids, past_key_values=Spy(), prompt_lookup_num_tokens=2, max_new_tokens=4)
    assert calls[0] == "recording"
    assert len(calls) > 1 and all(-2 <= int(n) <= 0 for n in calls[1:])


def test_continuous_batching_starts_in_two_methods() -> None:
    for name in ("generate_batch", "init_continuous_batching"):
        assert name in dir(GenerationMixin)
    assert "init_continuous_batching" in inspect.getsource(GenerationMixin.continuous_batching_context_manager)


def test_torch_s_context_parallelism_exchanges_softmax_attention() -> None:
    """By a function of torch's own, in place of the one that everybody calls."""
    from torch.distributed.tensor.experimental import _attention

    assert not (functional.scaled_dot_product_attention.__module__ or "").startswith("torch.distributed")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        with _attention.context_parallel(mesh, buffers=[random_tokens(1, 4)], buffer_seq_dims=[1]):
            assert functional.scaled_dot_product_attention.__module__.startswith("torch.distributed")
    finally:
        torch.distributed.destroy_process_group()


def test_generation_asks_the_model_for_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a cache is compileable, as ours is; else a 4D mask would be built and handed to the model."""
    asked = []

    def spy(attention_mask: torch.Tensor, **kwargs: object) -> torch.Tensor:
        asked.append(attention_mask.shape)
        return attention_mask

    student = student_of(SLIDING)
    monkeypatch.setattr(type(student), "create_masks_for_generate", staticmethod(spy))
    student.generate(random_tokens(1, 4), attention_mask=left_padding([1], 4), max_new_tokens=2)
    assert asked == [(1, 4), (1, 5)]


def test_missing_weights_are_initialised_by_a_method_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`initialize_weights`, when every parameter and buffer that was loaded bears a mark."""
    teacher = make_teacher("llama")
    teacher.save_pretrained(tmp_path)
    called, initialize = [], LinearizedModel.initialize_weights

    def spy(model: PreTrainedModel) -> None:
        mixer = next(iter(linearized_layers(model).values())).mixer
        called.append([getattr(x, "_is_hf_initialized", False) for x in (*mixer.parameters(), *mixer.buffers())])
        initialize(model)

    monkeypatch.setattr(LinearizedModel, "initialize_weights", spy)
    student = make_student(Case("", mixer="performer"), teacher)
    count = len(mixer_state := next(iter(linearized_layers(student).values())).mixer.state_dict())
    type(student).from_pretrained(tmp_path, config=student.config)
    assert called == [count * [False]]
    student.save_pretrained(tmp_path / "student")
    type(student).from_pretrained(tmp_path / "student")
    assert called[1:] == [count * [True]]
    assert len(mixer_state) > len(list(next(iter(linearized_layers(student).values())).mixer.parameters()))


# What transformers has for a base and we do not, and why.
NO_HEAD = {
    ("bert", "AutoModelForCausalLM"): "a decoder, which sees no token behind its own; an encoder's mixers see all",
    ("roberta", "AutoModelForCausalLM"): "likewise",
    ("qwen2", "AutoModelForDecision"): "the head of another model (Jev), whose config is one of Qwen2",
}
AUTO_CLASSES = [name for name in dir(transformers) if name.startswith("AutoModel")]


@pytest.mark.parametrize("architecture", ALL)
def test_auto_classes_know_our_classes(architecture: str) -> None:
    """Every head of the base, those of `NO_HEAD` aside."""
    ours = MODEL_CLASSES[f"linearized_{architecture}"]
    for auto in AUTO_CLASSES:
        mapping = getattr(transformers, auto)._model_mapping
        base = mapping.get(transformers.CONFIG_MAPPING[architecture], None)
        if base is None or (architecture, auto) in NO_HEAD:
            assert auto not in ours
            continue
        # DeiT has one with a head for its distillation token, too: a checkpoint says which it is of.
        assert tuple(cls.__bases__[-1] for cls in ours[auto]) == (base if isinstance(base, tuple) else (base,))
        registered = mapping[CONFIG_CLASSES[architecture]]
        assert (registered if isinstance(registered, tuple) else (registered,)) == ours[auto]


def test_every_architecture_is_tested() -> None:
    assert {*DECODERS, *ENCODERS} == ALL.keys()
