"""Write docs/models.md: the features of each supported architecture that tests prove.

    python -m tests.models_page    # runs these tests, the slow ones too, and writes the page

A cell is ticked where all tests of its feature are there for this architecture, and pass.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from linearize.hf.architectures import ARCHITECTURES
from linearize.run.folder import write_text
from tests.hf.decoders import DECODERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"


@dataclass(frozen=True)
class Feature:
    """A column: an architecture needs all of `tests`, and one of `either`; the star stands for its name."""

    label: str
    words: str
    tests: tuple[str, ...] = ()
    either: tuple[str, ...] = ()


def _generates(check: str) -> tuple[str, ...]:
    return (f"hf/test_generation.py::test_every_architecture[*-{check}]",)


OF_DECODERS = (
    Feature(
        "exact",
        "a softmax layer gives the teacher's outputs bit for bit, and a window over all tokens is softmax attention",
        (
            "hf/test_decoders.py::test_softmax_layers_are_the_teacher[*]",
            "hf/test_decoders.py::test_a_window_over_everything_is_the_teacher[*]",
        ),
    ),
    Feature(
        "documents",
        "documents packed into one row do not attend to each other, in the student and in its teacher",
        ("hf/test_decoders.py::test_documents_of_a_row_know_nothing_of_each_other[*]",),
    ),
    Feature(
        "inputs",
        "mixers receive the queries, keys and values of the model's own attention, rotated and unrotated",
        ("hf/test_decoders.py::test_q_k_v_are_those_of_a_mixer_that_asks_for_nothing[*]",),
    ),
    Feature(
        "scale",
        "attention has the model's own scale and soft cap",
        ("hf/test_decoders.py::test_scales_and_soft_caps_are_the_model_s_own[*]",),
    ),
    Feature(
        "transfer",
        "the target of attention transfer is the teacher's attention, for each document",
        tuple(
            f"hf/test_decoders.py::test_attention_transfer_s_target_is_the_teacher[*-{x}]"
            for x in ("sdpa-1e-10", "eager-0.0001")
        ),
    ),
    Feature(
        "blocks",
        "the weights of a few layers are read alone, for transfer block by block",
        either=(
            "hf/test_partial_model.py::test_blocks_of_other_architectures[*]",
            "hf/test_partial_model.py::test_blocks_one_after_the_other_are_the_model[1-*]",
            "hf/test_partial_model.py::test_experts_lie_otherwise_in_files[*]",
        ),
    ),
    Feature(
        "cache",
        "a cache changes no output, also with left padding, and padded prompts generate what each does alone",
        (
            "hf/test_decoders.py::test_left_padding_and_a_cache_leave_no_trace[*]",
            "hf/test_decoders.py::test_padded_prompts_generate_what_each_does_alone[*]",
        ),
    ),
    Feature("greedy", "greedy generation in a padded batch", _generates("greedy_by_hand")),
    Feature("beams", "beam search", _generates("beams")),
    Feature("static", "a static cache", _generates("static_cache")),
    Feature(
        "assisted",
        "assisted decoding, as target and as assistant",
        (*_generates("assisted"), *_generates("assisting")),
    ),
    Feature("lookup", "prompt lookup", _generates("prompt_lookup")),
    Feature("state", "states are saved, loaded and forked", (*_generates("saved"), *_generates("forked"))),
    Feature(
        "folder",
        "a saved folder loads in a new process with equal logits",
        ("hf/test_checkpoint.py::test_loads_in_a_fresh_process[*]",),
    ),
    Feature(
        "converter",
        "the teacher's own folder, with a linearized config, loads as a converted model",
        ("hf/test_decoders.py::test_a_teacher_s_folder_with_a_linearized_config_is_a_conversion[*]",),
    ),
    Feature(
        "run",
        "`linearize run` from the teacher's folder to the report, by LoLCATs: attention transfer, then LoRA",
        ("test_architectures_end_to_end.py::test_from_start_to_end[*]",),
    ),
)
OF_ENCODERS = (
    Feature(
        "exact",
        "without a converted layer the outputs are the teacher's, bit for bit",
        ("hf/test_encoders.py::test_without_a_converted_layer_it_is_the_teacher[*]",),
    ),
    Feature(
        "definition",
        "linear attention equals a slow loop over its definition",
        tuple(f"hf/test_encoders.py::test_the_definition[{x}-*]" for x in ("hedgehog", "lolcat", "elu")),
    ),
    Feature(
        "transfer",
        "the target of attention transfer is the teacher's attention",
        ("hf/test_encoders.py::test_softmax_outputs_are_the_layer_s_own[sdpa-1e-10-*]",),
    ),
    Feature(
        "padding",
        "padding changes no output, also with softmax layers between; images have no padding",
        (
            "hf/test_encoders.py::test_padding[hedgehog-*]",
            "hf/test_encoders.py::test_padding_with_softmax_layers_between[*]",
        ),
    ),
    Feature(
        "rows",
        "the order of the rows in a batch changes no output",
        ("hf/test_encoders.py::test_the_order_of_rows_does_not_matter[*]",),
    ),
    Feature(
        "larger images",
        "images larger than those of the teacher's training, if its positions can be interpolated",
        ("hf/test_encoders.py::test_larger_images_than_the_teacher_has_seen[*]",),
    ),
    Feature(
        "folder",
        "a saved folder loads in a new process with equal outputs",
        ("hf/test_checkpoint.py::test_loads_in_a_fresh_process[*]",),
    ),
    Feature(
        "converter",
        "the teacher's own folder, with a linearized config, loads as a converted model",
        ("hf/test_checkpoint.py::test_an_encoder_s_folder_with_a_linearized_config_is_a_conversion[*]",),
    ),
)
FILES = sorted({x.split("::")[0] for feature in OF_DECODERS + OF_ENCODERS for x in feature.tests + feature.either})


def proved(feature: Feature, name: str, outcomes: Mapping[str, bool]) -> bool:
    """Whether the tests of a feature that an architecture needs are there, and all that there are pass."""
    needed, either = (
        [outcomes.get(f"tests/{x.replace('*', name)}") for x in tests] for tests in (feature.tests, feature.either)
    )
    return all(needed) and (not either or any(either)) and False not in either


def _table(features: Iterable[Feature], names: Iterable[str], outcomes: Mapping[str, bool]) -> list[str]:
    features = list(features)
    lines = [f"| | {' | '.join(x.label for x in features)} |", f"| --- |{' :-: |' * len(features)}"]
    for name in names:
        ticks = ("✓" if proved(feature, name, outcomes) else "" for feature in features)
        lines.append(f"| {name} | {' | '.join(ticks)} |")
    return [*lines, "", *(f"- **{x.label}**: {x.words}." for x in features), ""]


def page(outcomes: Mapping[str, bool]) -> str:
    """The page, of the outcomes of tests by their ids."""
    encoders = [name for name, architecture in ARCHITECTURES.items() if architecture.bidirectional]
    decoders = [name for name in ARCHITECTURES if name not in encoders]
    scaled = [name for name in DECODERS if name not in decoders]
    return "\n".join(
        [
            "# Supported models",
            "",
            "    linearize plan --model M      # says why, if M is not supported",
            "",
            "The tables list the `model_type` of config.json. A tick means that a test of this architecture passes,",
            "on a small random model in fp64. `python -m tests.models_page` runs these tests and writes this page.",
            "All other models are refused with the reason, before weights are read. The meaning of the columns is",
            "explained below each table.",
            "",
            "## Decoders",
            "",
            "The last five rows are models with RoPE scaled for longer contexts.",
            "",
            *_table(OF_DECODERS, [*decoders, *scaled], outcomes),
            "## Encoders",
            "",
            *_table(OF_ENCODERS, encoders, outcomes),
        ]
    )


def run(*arguments: str) -> str:
    """What pytest says of the tests of the page: of their outcomes, or what else it is asked for."""
    files = [str(Path("tests", file)) for file in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", *arguments, *files]
    return subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True).stdout


def collected() -> list[str]:
    """The ids of all tests there are."""
    untyped = "addopts=--import-mode=importlib"  # to import with checks of types takes as long again
    return [line for line in run("--collect-only", "-o", untyped).splitlines() if "::" in line]


def outcomes() -> dict[str, bool]:
    """Whether each test passes."""
    lines = re.findall(r"^(PASSED|FAILED|ERROR) (\S+::.*?)(?: - .*)?$", run("-rA", "--tb=no"), re.MULTILINE)
    return {test: outcome == "PASSED" for outcome, test in lines}


if __name__ == "__main__":
    found = outcomes()
    write_text(PAGE, page(found))
    sys.exit(not found or not all(found.values()))
