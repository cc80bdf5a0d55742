"""Measure quality against bytes of state: KV budget allocation and a common window, untrained and trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import UserError, read_json, writing
from linearize.configs.evaluation import EvaluationConfig
from linearize.configs.memory import MemoryConfig
from linearize.configs.mixer import LayerPlan, MixerConfig
from linearize.data.load import load_dataset, load_processor
from linearize.data.packing import Dataset
from linearize.data.repeats import ordinary_tokens
from linearize.data.rows import PackedRows
from linearize.data.selection import reach_by
from linearize.evaluation.candidates import BATCH_SIZE
from linearize.evaluation.copying import CopyRows, copy_losses, copy_rows
from linearize.evaluation.intervals import Totals
from linearize.evaluation.perplexity import TokenLosses, paired_difference, token_losses
from linearize.evaluation.retrieval import Answers, RetrievalTest, answer, retrieval_result, retrieval_tests
from linearize.evaluation.shares import kept_copying, kept_far_context
from linearize.hf.checkpoint import read_config
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.report.frontier import ALLOCATED, LAYERS, WINDOW
from linearize.run.allocation import MeasuredPlan, measure, stored
from linearize.run.folder import Run, alone_in, check_output, claim, versions, write_json
from linearize.training.allocation import Allocation, allocate
from linearize.training.finetune import finetune
from linearize.training.layer_allocation import LayerAllocation, allocate_layers
from linearize.training.memory import head_bytes, head_mixer, require_room


@dataclass(frozen=True)
class Measurements:
    """Measurements of one model: losses on held-out rows and on copies, and answers about needles."""

    losses: TokenLosses
    copies: Sequence[Totals]
    answers: Answers


@dataclass(frozen=True)
class HeldOutData:
    """The data on which all models are measured."""

    rows: PackedRows
    copies: CopyRows
    needles: RetrievalTest

    def measure(self, model: PreTrainedModel, label: str) -> Measurements:
        """Measure a model on all of these data."""
        losses = token_losses(model, self.rows, batch_size=BATCH_SIZE, title=label)
        copies = copy_losses(model, self.copies, batch_size=BATCH_SIZE)
        return Measurements(losses, copies, answer(model, self.needles, batch_size=BATCH_SIZE, title=label))


def frontier(run: Run, fractions: Sequence[float], *, reference: int, command: str) -> dict[str, Any]:
    """Measure each way to reduce memory at each fraction of the teacher's cache; the same call resumes.

    At each fraction these are: one window in every head (`uniform`), and the recipe's budget allocated per head and per
    layer. If the recipe has a finetune stage, it also trains the window with sinks, both allocations and, for
    comparison, the teacher and the reference window, on the same tokens. The bytes of layers with full attention, which
    grow, are those at the recipe's `reference_length`.

    Args:
        run: its recipe has `memory`, whose size is replaced, and in `evaluation` the numbers of copies and needles; its
            folder keeps the results.
        reference: the window in tokens from which gains are measured; positions beyond two windows are far.

    Raises:
        UserError: anything that the user can fix.
    """
    if run.recipe.memory is None or not run.recipe.data.task.language:
        raise UserError("recipe: expected one of a language model with `memory`, found none; take `recommended`")
    check_output(run)
    with alone_in(run.folder):
        return _measured(run, run.recipe.memory, fractions, reference, command)


def _measured(
    run: Run, memory: MemoryConfig, fractions: Sequence[float], reference: int, command: str
) -> dict[str, Any]:
    recipe, config = run.recipe, read_config(run.model)
    shape = TeacherShape.from_config(config)
    plan = resolve(recipe, shape, dtype=run.dtype)
    per_head = memory.model_copy(update={"per": "kv_head", "learned_sink": False})
    per_layer = memory.model_copy(update={"per": "layer", "learned_sink": True, "sinks": 0})
    sizes = {fraction: {"bytes": None, "fraction": fraction} for fraction in fractions}
    for size in sizes.values():
        sized = per_head.model_copy(update=size)
        require_room(sized, shape, len(plan) - plan.count(None), run.dtype)
    processor = load_processor(recipe.data.task, run.model)
    dataset = load_dataset(recipe.data, processor, config, reach_by(run.load_teacher), seed=recipe.seed)
    longest = min(shape.max_positions, recipe.data.sequence_length)
    held_out = _held_out_data(dataset, processor, recipe.evaluation, reference, longest)
    teacher = run.load_teacher()
    claim(run, dataset)

    def measured(kind: MemoryConfig) -> MeasuredPlan:
        by = replace(run, recipe=recipe.model_copy(update={"memory": kind}))
        found = stored(by, shape, plan) or measure(by.recipe, shape, plan, teacher, dataset, processor, run.dtype)
        found.save(run)
        return found

    of_heads, of_layers = measured(per_head), measured(per_layer)
    assert isinstance(of_heads.allocation, Allocation) and isinstance(of_layers.allocation, LayerAllocation)
    needs = of_heads.allocation.needs
    layers = sorted(needs)
    untrained = {"teacher": held_out.measure(teacher, "teacher")}
    plan = _in_every_head(head_mixer(reference, 0, memory.sinks), layers, shape)
    untrained["window"] = held_out.measure(convert_layers(teacher, plan), f"window of {reference}")
    fine_tuned: dict[str, TokenLosses] = {}
    if recipe.finetune is not None:
        tuned = _trained(run, "teacher", None, teacher, dataset)
        fine_tuned["teacher_finetuned"] = held_out.measure(tuned, "teacher, trained").losses
        trained = _trained(run, f"window-{reference}", MeasuredPlan(plan), teacher, dataset)
        fine_tuned["window_finetuned"] = held_out.measure(trained, f"window of {reference}, trained").losses

    def point(fraction: float, name: str, made: MeasuredPlan, held: int, trained: bool) -> dict[str, Any]:
        label = f"{fraction:g}-{name.replace(' ', '-')}"
        path = run.folder / f"points-{reference}" / f"{label}{'-trained' if trained else ''}.json"
        if path.is_file():
            return read_json(path)
        model = _trained(run, label, made, teacher, dataset) if trained else made.convert(teacher, 0)
        student = held_out.measure(model, f"{fraction:.0%}: {name}")
        far = {"teacher": untrained["teacher"].losses, "window": untrained["window"].losses, "student": student.losses}
        answers = {name: x.answers for name, x in untrained.items()} | {"student": student.answers}
        found = {
            "minus_teacher": paired_difference(student.losses, untrained["teacher"].losses),
            "far": kept_far_context(far, 2 * reference),
            "far_finetuned": kept_far_context(fine_tuned | {"student": student.losses}, 2 * reference)
            if trained
            else None,
            "copying": kept_copying(untrained["teacher"].copies, student.copies),
            "needle": retrieval_result(held_out.needles, answers),
        }
        about = {"fraction": fraction, "name": name, "bytes": held, "trained": trained}
        with writing(path, 0):
            path.parent.mkdir(exist_ok=True)
        write_json(path, about | {key: x and asdict(x) for key, x in found.items()})
        return read_json(path)

    points: list[dict[str, Any]] = []
    chosen: dict[float, Any] = {}
    for fraction, size in sizes.items():
        heads = shape.num_kv_heads * len(layers)
        plans = {}
        for name, mixer in uniform(round(fraction * memory.reference_length), memory.sinks).items():
            held = heads * head_bytes(mixer, shape, run.dtype)
            plans[name] = MeasuredPlan(_in_every_head(mixer, layers, shape)), held
        allocation = allocate(per_head.model_copy(update=size), needs, shape, run.dtype)
        chosen[fraction] = {"window": allocation.window, "text": allocation.text, "recall": allocation.recall}
        made = MeasuredPlan(allocation.plan(shape.num_layers), allocation, of_heads.scores)
        plans[ALLOCATED] = made, allocation.held
        by_layer = allocate_layers(per_layer.model_copy(update=size), of_layers.allocation.losses, shape, run.dtype)
        chosen[fraction] |= {"full_layers": by_layer.full, "layer_window": by_layer.window}
        plans[LAYERS] = MeasuredPlan(by_layer.plan(shape.num_layers), by_layer, sinks=of_layers.sinks), by_layer.held
        points += [point(fraction, name, *planned, trained=False) for name, planned in plans.items()]
        if recipe.finetune is not None:
            points += [point(fraction, name, *plans[name], trained=True) for name in (WINDOW, ALLOCATED, LAYERS)]
    return {
        "command": command,
        "versions": versions(),
        "length": memory.reference_length,
        "reference": reference,
        "tokens": None if recipe.finetune is None else run.training_tokens(f"window-{reference}"),
        "chosen": chosen,
        "points": points,
    }


def _held_out_data(
    dataset: Dataset, tokenizer: Tokenizer, config: EvaluationConfig, reference: int, length: int
) -> HeldOutData:
    rows = dataset.test
    assert isinstance(rows, PackedRows)
    vocabulary = ordinary_tokens(len(tokenizer), tokenizer.all_special_ids)
    copies = copy_rows(vocabulary, window_size=reference, max_positions=length, rows=config.copy_rows, seed=0)
    if copies is None:
        raise UserError(f"--window: expected less than a third of the {length} tokens of a row, found {reference}")
    trials = config.recall_trials
    tests = retrieval_tests(
        tokenizer, window_size=reference, max_positions=length, haystack=rows.input_ids, trials=trials
    )
    return HeldOutData(rows, copies, next(test for test in tests if test.task.name == "needle"))


def uniform(pairs: int, sinks: int) -> dict[str, MixerConfig]:
    """Return mixers of all heads with this number of key-value pairs: a window with sinks, and one without."""
    return {
        "window": head_mixer(max(1, pairs), 0, 0),
        WINDOW: head_mixer(max(1, pairs - sinks), 0, sinks),
    }


def _in_every_head(mixer: MixerConfig, layers: Sequence[int], shape: TeacherShape) -> LayerPlan:
    return tuple(mixer if index in layers else None for index in range(shape.num_layers))


def _trained(
    run: Run, name: str, made: MeasuredPlan | None, teacher: PreTrainedModel, dataset: Dataset
) -> PreTrainedModel:
    """Fine-tune the teacher, or its student by `made`: load a finished one, resume one that was interrupted."""
    assert run.recipe.finetune is not None
    model = run.load_teacher() if made is None else made.convert(teacher, 0)
    options = {"output_dir": run.folder / name, "teacher": teacher, "seed": run.recipe.seed, "title": name}
    finetune(model, dataset.train, dataset.validation, run.recipe.finetune, **options)
    return model
