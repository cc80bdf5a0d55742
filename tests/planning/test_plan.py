"""Plans of published models, and against sums done by hand."""

from __future__ import annotations

import json
import re
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from linearize.configs import training as stages
from linearize.configs.mixer import LayerPlan
from linearize.hf.meta import MetaModel
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning.plan import Plan, finetuned_parameters, lora_parameters, make_plan, render
from linearize.planning.results import size
from linearize.recipe import Recipe, parse_overrides, recipe_names
from tests.hf.test_teacher import GPT2 as GPT2_CONFIG
from tests.hf.test_teacher import TINY
from tests.shapes import make_shape


def llama_like(model_type: str, layers: int, heads: int, kv: int, h: int, inner: int, vocab: int, **more: Any) -> dict:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv}
    sizes |= {"hidden_size": h, "intermediate_size": inner, "vocab_size": vocab}
    return {"model_type": model_type, "tie_word_embeddings": False, **sizes, **more}


LLAMA_3_8B = TeacherShape.from_config(llama_like("llama", 32, 32, 8, 4096, 14336, 128256))
MISTRAL_7B = TeacherShape.from_config(llama_like("mistral", 32, 32, 8, 4096, 14336, 32000, sliding_window=4096))
GPT2 = TeacherShape.from_config(GPT2_CONFIG)


GPU = torch.device("cuda")


def planned(
    teacher: TeacherShape,
    *assignments: str,
    name: str = "lolcats",
    training_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
) -> Plan:
    recipe = Recipe.load(name, parse_overrides(["evaluation.long=true", *assignments]))
    options: dict[str, Any] = {"dtype": dtype, "device": device, "training_tokens": training_tokens}
    return make_plan(recipe, teacher, resolve(recipe, teacher), **options)


# --- parameters -------------------------------------------------------------------------------------------------------


def test_experts_that_a_token_is_not_sent_to_cost_memory_but_no_time() -> None:
    def planned_with(experts: int, chosen: int) -> tuple[int, int]:
        fields = {"num_local_experts": experts, "num_experts_per_tok": chosen}
        plan = planned(TeacherShape.from_config(TINY["mixtral"] | fields), training_tokens=1)
        assert plan.transfer is not None and plan.transfer.flops is not None
        return plan.teacher_parameters, plan.transfer.flops

    (few, flops), (many, same), (again, more) = planned_with(4, 2), planned_with(9, 2), planned_with(9, 3)
    expert = 3 * 32 * 48
    assert many - few == 2 * 5 * (expert + 32) and again == many
    # Of two epochs, in two layers: the router, and then one more expert.
    assert same - flops == 2 * 2 * 2 * 5 * 32 and more - same == 2 * 2 * 2 * expert


def test_layers_without_rope_keep_nothing_unrotated() -> None:
    fields = {"num_hidden_layers": 2, "use_sliding_window": False, "layer_types": None}
    sizes = [
        planned(
            TeacherShape.from_config(TINY["smollm3"] | fields | {"no_rope_layers": rotating}),
            "mixer.feature_map.rotation=none",
        ).state_bytes
        for rotating in ([1, 1], [1, 0], [0, 0])
    ]
    # 64 slots with an unrotated key of 2 heads of 8 each.
    assert sizes[0] - sizes[1] == sizes[1] - sizes[2] == 64 * 2 * 8 * 2


def test_lora_on_llama_3_8b() -> None:
    # Rank 8: q and o 8 x (4096 + 4096), k and v 8 x (4096 + 1024), in 32 layers.
    lora = stages.LoRAConfig()
    model = MetaModel.of(LLAMA_3_8B)
    assert lora_parameters(lora, model) == 32 * 8 * (2 * 8192 + 2 * 5120) == 6_815_744
    assert lora_parameters(stages.LoRAConfig(rank=4, targets=("k",)), model) == 32 * 4 * 5120


def test_what_fine_tuning_trains() -> None:
    model, mixers = MetaModel.of(GPT2), 1000
    lora = lora_parameters(stages.LoRAConfig(), model)
    for fields, expected in (
        ({}, lora),
        ({"mixers": True}, lora + mixers),
        ({"mixers": True, "lora": None}, mixers),
        ({"all_weights": True, "lora": None}, model.total + mixers),
    ):
        assert finetuned_parameters(stages.FinetuneConfig(**fields), model, mixers) == expected


def test_lora_on_a_fused_projection_counts_it_once() -> None:
    # c_attn 768 -> 2304, c_proj 768 -> 768.
    model = MetaModel.of(GPT2)
    assert lora_parameters(stages.LoRAConfig(), model) == 12 * 8 * (768 + 2304 + 768 + 768)
    for targets in (("q",), ("k", "v"), ("q", "k", "v")):
        assert lora_parameters(stages.LoRAConfig(targets=targets), model) == 12 * 8 * (768 + 2304)
    assert lora_parameters(stages.LoRAConfig(targets=("o",)), model) == 12 * 8 * (768 + 768)


# --- state against cache ----------------------------------------------------------------------------------------------


def test_llama_3_8b() -> None:
    plan = planned(LLAMA_3_8B)
    assert plan.converted_layers == tuple(range(32)) and plan.kept_layers == ()
    # 2 (K and V) x 32 layers x 8 heads x 128 x 2 bytes.
    assert plan.teacher_cache_bytes_per_token == 131_072
    assert plan.student_cache_bytes_per_token == 0
    # Per layer: S and z 32 x 128 x 129 x 4 bytes; 64 slots x 2 x 8 x 128 x 2 bytes.
    assert plan.state_bytes == 32 * (2_113_536 + 262_144) == 76_021_760
    # Equal at 580 tokens, smaller from the next on.
    assert plan.state_bytes == 580 * 131_072 and plan.break_even_tokens == 581
    # Query and key maps 32 x 128 x 64 each and 32 window factors.
    assert plan.new_parameters == 32 * (2 * 262_144 + 32)


def test_per_kv_head_maps_quarter_the_linear_state() -> None:
    plan = planned(LLAMA_3_8B, "mixer.feature_map.per=kv_head")
    assert plan.state_bytes == 32 * (2_113_536 // 4 + 262_144)
    assert plan.break_even_tokens == plan.state_bytes // 131_072 + 1


def test_fp32_doubles_cache_and_slots_but_not_the_linear_state() -> None:
    plan = planned(LLAMA_3_8B, dtype=torch.float32)
    assert plan.teacher_cache_bytes_per_token == 262_144
    assert plan.state_bytes == 32 * (2_113_536 + 2 * 262_144)


def test_kept_layers_go_on_growing() -> None:
    whole, plan = planned(LLAMA_3_8B), planned(LLAMA_3_8B, "layers.keep_softmax=[-1, 0]")
    assert plan.kept_layers == (0, 31) and plan.converted_layers == tuple(range(1, 31))
    assert plan.student_cache_bytes_per_token == 2 * 4096
    assert plan.teacher_cache_bytes_per_token == 131_072
    assert plan.state_bytes * 32 == whole.state_bytes * 30
    assert plan.break_even_tokens == 581, "the layers that are kept cost the same on both sides"


def test_sliding_layers_do_not_grow() -> None:
    plan = planned(MISTRAL_7B, "layers.convert_sliding=true")
    assert plan.teacher_cache_bytes_per_token == plan.student_cache_bytes_per_token == 0
    assert plan.break_even_tokens is None
    half = TeacherShape(**{**vars(LLAMA_3_8B), "sliding_layers": tuple(range(0, 32, 2))})
    plan = planned(half)
    assert plan.kept_layers == tuple(range(0, 32, 2))
    assert plan.teacher_cache_bytes_per_token == 65_536 and plan.student_cache_bytes_per_token == 0
    assert plan.break_even_tokens == 581


# --- stages -----------------------------------------------------------------------------------------------------------


def test_numbers_are_written_out() -> None:
    assert [size(x) for x in (999, 1_040_000, 1023 << 20, 1 << 30)] == ["999 B", "1016 KiB", "1023 MiB", "1 GiB"]
    assert size(1_234_567) == "1.18 MiB"


@pytest.mark.parametrize("task_type, field", [("associative_recall", "length"), ("list_ops", "max_length")])
def test_rows_of_a_task_are_as_long_as_the_task_says(task_type: str, field: str) -> None:
    def flops(*assignments: str) -> int:
        task = f"data.task.type={task_type}"
        plan = planned(TeacherShape.from_config(TINY["llama"]), task, *assignments, name="hedgehog", training_tokens=1)
        assert plan.transfer is not None and plan.transfer.flops is not None
        return plan.transfer.flops

    short, long = (flops(f"data.task.{field}={length}") for length in (32, 64))
    assert short < long
    assert flops(f"data.task.{field}=32", "data.sequence_length=256") == short


def test_tokens() -> None:
    def tokens(*assignments: str, training_tokens: int | None) -> tuple[int | None, int | None]:
        plan = planned(GPT2, *assignments, training_tokens=training_tokens)
        assert plan.transfer is not None and plan.transfer is not None
        for stage in (plan.transfer, plan.finetune):
            assert (stage.flops is None) == (stage.tokens is None)
        return plan.transfer.tokens, plan.finetune.tokens

    assert tokens(training_tokens=1000) == (2000, 2000)
    assert tokens("transfer.epochs=3", "finetune.max_tokens=1500", training_tokens=1000) == (3000, 1500)
    assert tokens("transfer.max_tokens=500", training_tokens=None) == (500, None)


def test_flops_by_hand() -> None:
    # One layer, everything small: L = 16 tokens a row.
    teacher = TeacherShape.from_config(llama_like("llama", 1, 2, 1, 8, 12, 10))
    recipe = ["data.sequence_length=16", "mixer.span.window_size=4", "transfer.epochs=1", "finetune.epochs=1"]
    plan = planned(teacher, *recipe, training_tokens=1)
    # q, o 8 x 8; k, v 8 x 4; MLP 3 x 8 x 12; norms 3 x 8; head 8 x 10. The embedding is only looked up.
    weights = 2 * 64 + 2 * 32 + 288 + 24 + 80
    assert plan.teacher_parameters == weights + 80
    # H D = 8. Softmax: 4 x 8 x keys. Window: 4 keys. Maps: 2 x (2 x 4 x 2) numbers.
    # S [2, 4, 4] is folded and read, and so is z [2, 4] for the sum.
    mixer = 4 * 8 * 4 + 2 * (2 * 2 * 4 * 2) + 2 * (2 * 2 * 4 * 4) + 2 * 2 * 4
    assert plan.transfer is not None and plan.transfer.flops == 2 * weights + 4 * 8 * 8 + 3 * mixer
    lora = 8 * (16 + 12 + 12 + 16)
    assert plan.finetune is not None and plan.finetune.trainable_parameters == lora
    assert plan.finetune.flops == 4 * weights + 6 * lora + 3 * mixer
    assert plan.control_flops == 3 * 2 * plan.finetune.flops, "three controls, on the tokens of both stages"


def test_every_recipe_can_be_planned() -> None:
    teacher = TeacherShape.from_config(TINY["llama"])
    for name in recipe_names():
        recipe = Recipe.load(name)
        plan = make_plan(recipe, teacher, resolve(recipe, teacher), training_tokens=1000)
        assert plan.state_bytes > 0 and plan.break_even_tokens and plan.finetune is not None and plan.finetune.flops
        assert "memory is saved" in rendered(plan)


def test_controls() -> None:
    assert planned(GPT2).control_flops is None, "as unknown as the data"
    for setting in ("evaluation.trained_controls=false", "evaluation.long=false"):
        assert planned(GPT2, setting, training_tokens=10).control_flops == 0
    assert planned(GPT2, "finetune=null", training_tokens=10).control_flops == 0
    plan = planned(GPT2, training_tokens=10)
    assert plan.finetune is not None and plan.finetune.flops
    assert plan.transfer is not None and plan.transfer.tokens == plan.finetune.tokens == 20
    assert plan.control_flops == 3 * 2 * plan.finetune.flops
    # The teacher's outputs are all there is to learn, and the teacher has them.
    plan = planned(GPT2, "finetune.loss.labels=0", "finetune.loss.kl=1", training_tokens=10)
    assert plan.finetune is not None and plan.control_flops == 2 * 2 * plan.finetune.flops


def test_memory_and_disk() -> None:
    plan = planned(LLAMA_3_8B, "data.sequence_length=256", device=GPU)
    transfer, finetune = plan.transfer, plan.finetune
    assert transfer is not None and finetune is not None
    assert (transfer.trainable_parameters, finetune.trainable_parameters) == (plan.new_parameters, 6_815_744)
    assert transfer.memory_bytes is not None and finetune.memory_bytes is not None
    weights = 2 * (plan.teacher_parameters + plan.new_parameters)
    assert weights + 16 * plan.new_parameters < transfer.memory_bytes < finetune.memory_bytes
    checkpoints = 16 * (plan.new_parameters + 6_815_744)
    assert plan.disk_bytes == 2 * plan.teacher_parameters + 4 * plan.new_parameters + checkpoints
    assert "of memory" in rendered(plan) and "of memory" not in rendered(planned(LLAMA_3_8B))


LLAMA_31_405B = make_shape("llama", 126, 128, 8, 128, 16384, 53248, 128256, 131072, False)


def test_activation_checkpointing_takes_a_forward_pass_more() -> None:
    sizes = ["data.sequence_length=8192", "finetune.micro_batch_size=1"]
    kept, again = (
        planned(LLAMA_3_8B, *sizes, f"finetune.activation_checkpointing={x}", training_tokens=8192).finetune
        for x in ("false", "true")
    )
    assert kept is not None and again is not None and kept.flops is not None and again.flops is not None
    through_layers = 2 * (8_030_261_248 - 2 * 128256 * 4096)
    assert 1.0 < (again.flops - kept.flops) / again.tokens / through_layers < 1.2


def test_block_by_block() -> None:
    """LoLCATs sec. 3.3.2: every layer's states of 50M tokens would take over 200 TB; nine layers fit one 80 GB GPU."""
    whole = planned(LLAMA_31_405B, "transfer.layers_per_block=null", name="lolcats-405b")
    blocks = planned(LLAMA_31_405B, name="lolcats-405b")
    assert whole.activation_bytes == 0 and blocks.activation_bytes == 13 * 20_000_000 * 16384 * 2
    assert whole.transfer is not None and blocks.transfer is not None
    assert blocks.transfer.flops == whole.transfer.flops and blocks.disk_bytes == whole.disk_bytes
    per_layer = ("transfer.layers_per_block=1", "transfer.max_tokens=50_000_000")
    states = planned(LLAMA_31_405B, *per_layer, name="lolcats-405b").activation_bytes
    assert states is not None and 200e12 < states < 210e12
    unknown = planned(LLAMA_31_405B, "transfer.max_tokens=null", name="lolcats-405b")
    assert unknown.activation_bytes is None
    assert "between blocks" in rendered(blocks) and "between blocks" not in rendered(whole)


def test_two_steps() -> None:
    one = planned(GPT2, training_tokens=10)
    two = planned(GPT2, "adapt={lora: null, mixers: true}", training_tokens=10)
    assert one.adapt is None and two.adapt is not None
    assert two.adapt.trainable_parameters == two.new_parameters and two.finetune == one.finetune
    assert two.disk_bytes == one.disk_bytes + 16 * two.new_parameters
    assert "adapt" in rendered(two) and "adapt" not in rendered(one)


def test_stages_that_a_recipe_leaves_out() -> None:
    plan = planned(GPT2, "transfer=null", "finetune=null", training_tokens=10)
    assert plan.transfer is None and plan.finetune is None
    assert plan.disk_bytes == 2 * plan.teacher_parameters + 4 * plan.new_parameters


# --- faults and presentation ------------------------------------------------------------------------------------------


def test_programmer_faults() -> None:
    recipe = Recipe.load("lolcats")
    layers: LayerPlan = resolve(recipe, GPT2)
    with pytest.raises(ValueError, match="12"):
        make_plan(recipe, GPT2, layers[1:], training_tokens=None)


def test_json() -> None:
    plan = planned(GPT2, training_tokens=10)
    written = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert written["state_bytes"] == plan.state_bytes and written["converted_layers"] == list(range(12))
    assert plan.finetune is not None and written["finetune"]["flops"] == plan.finetune.flops


def rendered(plan: Plan) -> str:
    text = StringIO()
    Console(file=text, width=200).print(render(plan))
    return text.getvalue()


def test_render() -> None:
    text = rendered(planned(LLAMA_3_8B, training_tokens=20_000_000))
    for part in ("32 of 32", "8.03 billion", "16.8 million new", "128 KiB per token", "72.5 MiB", "from 581 tokens on"):
        assert part in text
    assert "40 million tokens" in text and "at any length" in text
    for length, teacher in (("8k", "1 GiB"), ("32k", "4 GiB"), ("128k", "16 GiB")):
        assert re.search(rf"at {length} tokens +\W teacher {teacher}, student 72.5 MiB per sequence", text)


def test_render_says_what_is_not_known_or_not_won() -> None:
    assert "unknown amount of data" in rendered(planned(LLAMA_3_8B))
    assert "at no length" in rendered(planned(MISTRAL_7B, "layers.convert_sliding=true"))
    kept = rendered(planned(LLAMA_3_8B, "layers.keep_softmax=[0, 31]"))
    assert "0, 31" in kept and "and 8 KiB per token" in kept
    assert "teacher 16 GiB, student 1.07 GiB per sequence" in kept


@pytest.mark.parametrize(
    "layers, heads, hidden, inner", [(32, 32, 4096, 14336), (80, 64, 8192, 28672), (126, 128, 16384, 53248)]
)
def test_a_tenth_of_the_cache(layers: int, heads: int, hidden: int, inner: int) -> None:
    """Of Llama 3's three sizes, whose attention has 8 KV heads of 128."""
    teacher = TeacherShape.from_config(llama_like("llama", layers, heads, 8, hidden, inner, 128256))
    plan = planned(teacher, "memory.reference_length=8192", "memory.fraction=0.1", name="recommended")
    assert plan.student_cache_bytes_per_token == 0
    pair = 2 * 8 * 128 * 2
    assert plan.teacher_cache_bytes_per_token == layers * pair
    assert 0 <= 0.1 * 8192 * layers * pair - plan.state_bytes < layers * pair
