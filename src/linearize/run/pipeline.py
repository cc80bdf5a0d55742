"""Linearize a teacher by a recipe, stage by stage, and measure the student. The same call resumes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from linearize.base import UserError
from linearize.configs.mixer import LayerPlan
from linearize.data.load import load_processor
from linearize.data.packing import Dataset
from linearize.data.rows import PackedRows
from linearize.distributed import all_reduce_min, barrier, broadcast_object, main_process_first, world
from linearize.evaluation.harness import check_tasks
from linearize.evaluation.results import Results
from linearize.hf.checkpoint import read_config, save_student
from linearize.hf.classes import read_plan
from linearize.hf.partial_model import StoredWeights
from linearize.hf.sharded_checkpoint import save_sharded
from linearize.hf.teacher import TeacherShape
from linearize.layer_plan import resolve
from linearize.planning import plan as planning
from linearize.planning.results import TRAINING_STAGES
from linearize.recipe import Recipe
from linearize.run.allocation import measure, stored
from linearize.run.evaluate import control, measure_candidates, write_results
from linearize.run.folder import Run, alone_in, check_output, claim, write_json
from linearize.run.rows import kept, rows_of
from linearize.training.attention_transfer import attention_transfer, load_transferred, transfer_errors
from linearize.training.blockwise import BlockwiseTransfer, layer_blocks, unfinished_blocks
from linearize.training.finetune import finetune, refuse_quantized

STAGES = ("convert", *TRAINING_STAGES, "evaluate")
TITLES = {"adapt": "adapting new weights", "finetune": "fine-tuning"}
ROOM = 0.9  # share of a GPU's memory for the run; the rest is for the driver and parts that the forecast leaves out


def run(
    run: Run,
    *,
    dataset: Dataset | None = None,
    until: str = "evaluate",
    block: int | Literal["any"] | None = None,
    command: str | None = None,
    trust_tasks: bool = False,
) -> Results | None:
    """Linearize `run.model` as `run.recipe` says; return the results, or None if `until` or `block` end it earlier.

    Args:
        dataset: rows to use instead of the recipe's data.
        until: the last stage to run, one of `STAGES`.
        block: in a block-wise transfer, train only this block of layers; "any": train all blocks that no other job has
            claimed, one after another.
        command: the user's command line, for the results.
        trust_tasks: whether benchmarks of the recipe may be task YAMLs, which can run any code.

    Raises:
        UserError: anything that the user can fix; no file is half-written then.
    """
    check_tasks(run.recipe.evaluation, trusted=trust_tasks)
    shape = TeacherShape.from_config(read_config(run.model))
    layers = resolve(run.recipe, shape, dtype=run.dtype)
    planning.check_run(run.recipe, shape, layers)
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
    """Do the work of `run`, after its checks."""
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
    tuned = {"adapt": run.recipe.adapt, "finetune": run.recipe.finetune}  # stages that train on the model's outputs
    for name, config in tuned.items():
        if config is not None:
            refuse_quantized(teacher, config, name)
    planned = stored(run, shape, layers)
    if planned is None:
        planned = broadcast_object(measure(run.recipe, shape, layers, teacher, dataset, processor, run.dtype))
    layers = planned.layers
    student = planned.convert(teacher, run.recipe.seed)
    with main_process_first():
        claim(run, dataset)
        dataset = kept(run, processor if own else None, dataset)
    if world().main:
        planned.save(run)
    write_plan(run, shape, layers, dataset)
    if until == "convert":
        save(run, student, processor)
        return None
    if run.recipe.transfer is not None:
        folder = run.folder / "transfer"
        if run.recipe.transfer.layers_per_block is None:
            rows, seed = (dataset.train, dataset.validation), run.recipe.seed
            attention_transfer(student, *rows, run.recipe.transfer, output_dir=folder, seed=seed)
        else:  # trained already, by `transfer_by_block`
            load_transferred(student, run.recipe.transfer, folder)
        layers = final_layers(run, shape)
        if layers != read_plan(student.config):
            write_plan(run, shape, layers, dataset)
            student = replace(planned, layers=layers).convert(teacher, run.recipe.seed)
            load_transferred(student, run.recipe.transfer, folder)
    for name, config in tuned.items():
        if config is not None and STAGES.index(name) <= STAGES.index(until):
            options = {"output_dir": run.folder / name, "seed": run.recipe.seed, "title": TITLES[name]}
            finetune(student, dataset.train, dataset.validation, config, teacher=teacher, **options)
    if until != "evaluate":
        return None
    train_controls(run, teacher, student, layers, dataset)
    if not world().main and not run.recipe.data.task.language:  # processes do not divide examples of other tasks
        return None
    save(run, student, processor)
    results = measure_candidates(teacher, student, dataset, processor, run.recipe, run, run.device, command)
    if not world().main:
        return None
    write_results(run.folder, results)
    return results


def laid_out(run: Run, shape: TeacherShape, layers: LayerPlan) -> Run:
    """Return the run with `sharded`, whether its processes divide the weights; all of them call this.

    `auto` divides weights if the smallest GPU has less memory than the plan's largest stage takes with the whole model.
    It does not on CPUs, whose memory the processes of a machine share anyway.

    Raises:
        UserError: `full`, for a model that cannot be divided.
    """
    wanted = run.recipe.distributed.shard
    if world().size == 1 or wanted == "none" or (wanted == "auto" and fits(run, shape, layers)):
        return run
    reasons = {
        f"a decoder, found {shape.model_type!r}": shape.bidirectional,
        f"a language model, found the task {run.recipe.data.task.type}": not run.recipe.data.task.language,
        "pretrained weights, found weights=random": run.recipe.weights == "random",
    }
    for reason, holds in reasons.items():
        if holds and wanted == "full":
            raise UserError(f"distributed.shard: expected {reason}; set distributed.shard=none")
    return replace(run, sharded=not any(reasons.values()))


def fits(run: Run, shape: TeacherShape, layers: LayerPlan) -> bool:
    """Return whether the device of every process has room for the whole model in every stage."""
    if run.device.type != "cuda":
        return True
    plan = planning.make_plan(run.recipe, shape, layers, dtype=run.dtype, device=run.device, training_tokens=None)
    needed = max((stage.memory_bytes or 0 for stage in (plan.transfer, plan.adapt, plan.finetune) if stage), default=0)
    return needed <= ROOM * all_reduce_min(torch.cuda.get_device_properties(run.device).total_memory)


def save(run: Run, student: PreTrainedModel, processor: Any) -> None:
    """Write the student to the run's model folder, unless that exists; all processes call this."""
    folder = run.folder / "model"
    write = partial(save_sharded, student) if run.sharded else None
    barrier()  # no process writes while another still checks
    there = folder.exists()
    barrier()
    if there:
        return
    if not world().main:
        if write is not None:
            write(folder)
        return
    texts = {name: (run.folder / name).read_text(encoding="utf-8") for name in ("recipe.yaml", "run.json")}
    texts["README.md"] = f"# {run.folder.name}\n\nNot measured yet.\n"
    save_student(student, processor, texts, folder, write)


def write_plan(run: Run, shape: TeacherShape, layers: LayerPlan, dataset: Dataset) -> None:
    """Write plan.json: the plan of the run and its costs."""
    options = {"dtype": run.dtype, "device": run.device if run.device.type == "cuda" else None}
    plan = planning.make_plan(run.recipe, shape, layers, training_tokens=dataset.train.num_tokens, **options)
    write_json(run.folder / "plan.json", plan.to_json())


def check_block(recipe: Recipe, shape: TeacherShape, block: int | Literal["any"] | None) -> None:
    """Raise UserError if the recipe has no such block."""
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
    """Train all blocks of layers, or one, or all unclaimed ones, without ever loading the whole teacher."""
    assert run.recipe.transfer is not None
    StoredWeights(run.model)  # raises an error for models that cannot be read block by block
    claim(run, dataset)
    dataset = kept(run, processor, dataset)
    train_rows, validation_rows = dataset.train, dataset.validation
    assert isinstance(train_rows, PackedRows) and isinstance(validation_rows, PackedRows)  # by `check_run`
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
    """Return the blocks of layers that a block-wise transfer still has to train."""
    assert run.recipe.transfer is not None
    shape = TeacherShape.from_config(read_config(run.model))
    return unfinished_blocks(run.folder / "transfer", len(layer_blocks(shape.num_layers, run.recipe.transfer)))


def final_layers(run: Run, shape: TeacherShape) -> LayerPlan:
    """Return the layer plan that follows from the recipe and the layers' measured transfer errors."""
    if run.recipe.transfer is None:
        return resolve(run.recipe, shape, dtype=run.dtype)
    return resolve(run.recipe, shape, transfer_errors(run.folder / "transfer", shape.num_layers))


def train_controls(
    run: Run, teacher: PreTrainedModel, student: PreTrainedModel, layers: LayerPlan, dataset: Dataset
) -> None:
    """Fine-tune the run's controls on as many tokens as all stages of the student together."""
    total = run.training_tokens("transfer", "adapt", "finetune")
    for name, folder in run.controls.items():
        assert run.recipe.finetune is not None and total is not None  # fine-tuning at least is finished
        # An epoch drops rows that fill no step, but always less than half of all rows.
        budget = {"max_tokens": total, "epochs": 1 + 2 * total // dataset.train.num_tokens}
        config = run.recipe.finetune.model_copy(update=budget)
        options = {"output_dir": folder, "seed": run.recipe.seed, "title": f"control: {name.replace('_finetuned', '')}"}
        model = control(run, teacher, student, layers, name)
        finetune(model, dataset.train, dataset.validation, config, teacher=teacher, **options)
