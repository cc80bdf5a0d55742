"""`run`: a teacher and a recipe in, a student and the measure of it out, stage by stage; the same again resumes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan
from linearize.configs.training import FinetuneConfig
from linearize.data.load import load_processor
from linearize.data.packing import Dataset
from linearize.data.rows import PackedRows
from linearize.distributed import barrier, broadcast_object, main_process_first, world
from linearize.evaluation.harness import check_tasks
from linearize.evaluation.results import Results
from linearize.hf.checkpoint import read_config, save_student
from linearize.hf.classes import read_plan
from linearize.hf.partial_model import StoredWeights
from linearize.hf.sharded_checkpoint import save_sharded
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning import plan as planning
from linearize.planning.checks import check_run
from linearize.planning.results import TRAINING_STAGES
from linearize.recipe import Recipe
from linearize.run.allocation import measure, stored
from linearize.run.evaluate import control, measure_run, write_results
from linearize.run.folder import Run, about_run, alone_in, check_output, claim, write_json
from linearize.run.layout import laid_out
from linearize.run.rows import kept, rows_of
from linearize.training.attention_transfer import attention_transfer, load_transferred, transfer_errors
from linearize.training.blockwise import BlockwiseTransfer, layer_blocks, unfinished_blocks
from linearize.training.finetune import finetune, refuse_quantized

STAGES = ("convert", *TRAINING_STAGES, "evaluate")


def run(
    run: Run,
    *,
    dataset: Dataset | None = None,
    until: str = "evaluate",
    block: int | Literal["any"] | None = None,
    command: str | None = None,
    trust_tasks: bool = False,
) -> Results | None:
    """Linearize `run.model` as `run.recipe` says; returns the measure of it, or None if `until` or `block` end before.

    Args:
        dataset: rows to use instead of what the recipe names.
        until: the last stage to run, one of `STAGES`.
        block: only train this block of layers, of a transfer block by block; "any": one after another that no other job
            has taken.
        command: what the user typed, to stand beside the results.
        trust_tasks: benchmarks of the recipe may be task YAMLs, which can run any code.

    Raises:
        UserError: anything that the user can fix; nothing is half-written then.
    """
    check_tasks(run.recipe.evaluation, trusted=trust_tasks)
    shape = TeacherShape.from_config(read_config(run.model))
    layers = resolve(run.recipe, shape, dtype=run.dtype)
    check_run(run.recipe, shape, layers)
    check_block(run.recipe, shape, block)
    check_output(run)
    run = laid_out(run, shape, layers)
    with alone_in(run.folder) if block is None else nullcontext():  # the jobs of a transfer by blocks share the folder
        return _carry_out(run, shape, layers, dataset, until, block, command)


def _carry_out(
    run: Run,
    shape: TeacherShape,
    layers: LayerPlan,
    dataset: Dataset | None,
    until: str,
    block: int | Literal["any"] | None,
    command: str | None,
) -> Results | None:
    """`run`, once it is known to be possible."""
    contents = read_config(run.model)
    processor = load_processor(run.recipe.data.task, run.model)
    own = dataset is None
    dataset = rows_of(run, processor, contents) if dataset is None else dataset
    if run.recipe.transfer is not None and run.recipe.transfer.layers_per_block is not None:
        if world().size > 1:
            raise UserError(
                f"transfer.layers_per_block: expected one process, found {world().size}; start one for each block, "
                "with --block, or set transfer.layers_per_block=null"
            )
        transfer_by_block(run, shape, layers, dataset, block, processor if own else None)
        if block is not None or until == "transfer":
            return None
    teacher = run.load_teacher()
    for stage, config in (("adapt", run.recipe.adapt), ("finetune", run.recipe.finetune)):
        if config is not None:
            refuse_quantized(teacher, config, stage)
    measured = stored(run, shape, layers)
    if measured is None:
        measured = broadcast_object(measure(run.recipe, shape, layers, teacher, dataset, processor, run.dtype))
    layers = measured.layers
    student = measured.convert(teacher, run.recipe.seed)
    with main_process_first():
        claim(run, dataset)
        dataset = kept(run, processor if own else None, dataset)
    if world().main:
        measured.save(run)
    write_plan(run, shape, layers, dataset)
    if until == "convert":
        save(run, student, processor)
        return None
    if run.recipe.transfer is not None:
        transfer(run, student, dataset)
        layers = final_layers(run, shape)
        if layers != read_plan(student.config):
            write_plan(run, shape, layers, dataset)
            student = replace(measured, layers=layers).convert(teacher, run.recipe.seed)
            load_transferred(student, run.recipe.transfer, run.folder / "transfer")
    for name in ("adapt", "finetune"):
        if STAGES.index(name) <= STAGES.index(until):
            train_outputs(run, name, student, teacher, dataset)
    if until != "evaluate":
        return None
    train_controls(run, teacher, student, layers, dataset)
    if not world().main and not run.recipe.data.task.language:  # whose examples processes do not share
        return None
    save(run, student, processor)
    results = measure_run(run, teacher, student, processor, dataset, command)
    if not world().main:
        return None
    write_results(run.folder, results)
    return results


def save(run: Run, student: PreTrainedModel, processor: Any) -> None:
    """The student in a folder of its own, where there is none yet; of divided weights each process gives its part."""
    folder = run.folder / "model"
    write = partial(save_sharded, student) if run.sharded else None
    barrier()  # none begins while another still looks
    there = folder.exists()
    barrier()
    if there:
        return
    if not world().main:
        if write is not None:
            write(folder)
        return
    card = f"# {run.folder.name}\n\nNot measured yet.\n"
    texts = {"README.md": card} | about_run(run)
    save_student(student, processor, texts, folder, write)


def write_plan(run: Run, shape: TeacherShape, layers: LayerPlan, dataset: Dataset) -> None:
    """plan.json: what the run means and costs."""
    options = {"dtype": run.dtype, "device": run.device if run.device.type == "cuda" else None}
    plan = planning.make_plan(run.recipe, shape, layers, training_tokens=dataset.train.num_tokens, **options)
    write_json(run.folder / "plan.json", plan.to_json())


def check_block(recipe: Recipe, shape: TeacherShape, block: int | Literal["any"] | None) -> None:
    """See that the recipe has such a block.

    Raises:
        UserError: it has not.
    """
    if block is None:
        return
    if recipe.transfer is None or recipe.transfer.layers_per_block is None:
        raise UserError("--block: expected a recipe with transfer.layers_per_block, found null; set it with --set")
    count = len(layer_blocks(shape.num_layers, recipe.transfer))
    if block != "any" and not 0 <= block < count:
        raise UserError(f"--block: expected one of the blocks 0 to {count - 1}, or any; found {block}")


def transfer_by_block(
    run: Run,
    shape: TeacherShape,
    layers: LayerPlan,
    dataset: Dataset,
    block: int | Literal["any"] | None,
    processor: Any,
) -> None:
    """Train all blocks of layers, or one, or any that is free, without ever loading the whole teacher."""
    assert run.recipe.transfer is not None
    StoredWeights(run.model)  # refuses what cannot be read block by block before anything is written
    train_rows, validation_rows = dataset.train, dataset.validation
    if not (isinstance(train_rows, PackedRows) and isinstance(validation_rows, PackedRows)):
        raise UserError(
            f"transfer.layers_per_block: expected a language model, found the task {run.recipe.data.task.type}; "
            "set transfer.layers_per_block=null"
        )
    claim(run, dataset)
    dataset = kept(run, processor, dataset)
    train_rows, validation_rows = dataset.train, dataset.validation
    assert isinstance(train_rows, PackedRows) and isinstance(validation_rows, PackedRows)
    write_plan(run, shape, layers, dataset)
    job = BlockwiseTransfer(
        run.model,
        layers,
        run.recipe.transfer,
        train_rows,
        validation_rows,
        run.folder / "transfer",
        run.dtype,
        run.device,
        run.recipe.seed,
    )
    if block == "any":
        job.train_unclaimed()
    else:
        job.train(range(len(job.blocks)) if block is None else [block])
    if block is None:
        job.merge()
        write_plan(run, shape, final_layers(run, shape), dataset)


def blocks_to_do(run: Run) -> list[int]:
    """The blocks of layers that are still to be trained, of a transfer block by block."""
    assert run.recipe.transfer is not None
    shape = TeacherShape.from_config(read_config(run.model))
    return unfinished_blocks(run.folder / "transfer", len(layer_blocks(shape.num_layers, run.recipe.transfer)))


def transfer(run: Run, student: PreTrainedModel, dataset: Dataset) -> None:
    """The stage that trains the student's mixers; loaded where it is finished, resumed where it was begun."""
    recipe, rows, folder = run.recipe, (dataset.train, dataset.validation), run.folder / "transfer"
    assert recipe.transfer is not None
    if recipe.transfer.layers_per_block is None:
        attention_transfer(student, *rows, recipe.transfer, output_dir=folder, seed=recipe.seed)
    else:  # trained already, by `transfer_by_block`
        load_transferred(student, recipe.transfer, folder)


def final_layers(run: Run, shape: TeacherShape) -> LayerPlan:
    """Return the layer plan with the layers' transfer errors, which the run has measured."""
    if run.recipe.transfer is None:
        return resolve(run.recipe, shape, dtype=run.dtype)
    return resolve(run.recipe, shape, transfer_errors(run.folder / "transfer", shape.num_layers))


def train_outputs(run: Run, name: str, student: PreTrainedModel, teacher: PreTrainedModel, dataset: Dataset) -> None:
    """A stage that trains on the model's outputs: `adapt` or `finetune`; nothing where the recipe has none."""
    config: FinetuneConfig | None = getattr(run.recipe, name)
    if config is None:
        return
    options = {"output_dir": run.folder / name, "teacher": teacher, "seed": run.recipe.seed, "title": TITLES[name]}
    finetune(student, dataset.train, dataset.validation, config, **options)


def train_controls(
    run: Run, teacher: PreTrainedModel, student: PreTrainedModel, layers: LayerPlan, dataset: Dataset
) -> None:
    """Train what the student must be compared with: finetuning alike of the teacher, and of its window alone.

    On as many tokens as all stages of the student together, so that more training is not what sets them apart.
    """
    total = run.training_tokens("transfer", "adapt", "finetune")
    for name, folder in run.controls.items():
        assert run.recipe.finetune is not None and total is not None  # fine-tuning at least is finished
        # An epoch drops rows that fill no step, but never as many as half of them.
        budget = {"max_tokens": total, "epochs": 1 + 2 * total // dataset.train.num_tokens}
        config = run.recipe.finetune.model_copy(update=budget)
        options = {"output_dir": folder, "seed": run.recipe.seed, "title": f"control: {name.replace('_finetuned', '')}"}
        model = control(run, teacher, student, layers, name)
        finetune(model, dataset.train, dataset.validation, config, teacher=teacher, **options)


TITLES = {"adapt": "adapting new weights", "finetune": "fine-tuning"}
