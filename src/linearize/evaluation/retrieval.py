"""Can a model still fetch what it has read, from within the window and from beyond it? Tests with right answers.

Each is a grid of cells: the rows are distances, the columns depend on the task. `retrieval_tests` makes the token rows
of every cell once; `answer` lets one model at a time answer them; `retrieval_result` compares the models. What copying
random tokens shows is in `copying`.

Distance, for every task: the answer stands in the text twice, where it is given and where it is asked for, and the
distance is the number of tokens from the one to the other. So the query that has to name it stands `distance` - 1 after
the token to be named, and a distance greater than the window is beyond the window (of one layer: over several layers,
a window passes things on a little further).

No text is generated for the tests. An answer counts as right where each of its tokens is the most likely one, given the
right ones before: exactly the answers that greedy decoding gives.

Axes: N trials of a cell, B of them per forward pass, L tokens of the longest, S and T tokens of filler, V ordinary
tokens.
"""

# The types of torch and transformers are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product, takewhile

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from linearize.base import progress
from linearize.data.repeats import ordinary_tokens
from linearize.data.rows import inference
from linearize.data.splits import ENOUGH
from linearize.distributed import put_together, shard_batches
from linearize.evaluation.intervals import Interval, Totals, require_shape, resample

# A teacher that beats the floor by so little can fetch next to nothing, and a share of that says nothing.
NEGLIGIBLE = 0.05

_FILLER = (
    "Rain fell on the roof all day. The cat slept by the stove. Nobody came up the road. "
    "Supper was late again. The clock in the kitchen had stopped. "
)
_COLOURS = ("red", "blue", "green", "black", "white", "brown", "yellow", "purple", "silver", "pink")
_THINGS = ("lamp", "key", "cup", "hat", "coin", "ring", "book", "bell", "knife", "ball", "stone", "rope", "doll", "map")

Column = int | float
Cell = tuple[int, Column]
"""Row value (distance in tokens) and column value."""
Answers = dict[Cell, Float[Tensor, " N"]]
"""By cell and trial, the share of its questions that one model answers right."""


@dataclass(frozen=True)
class Setting:
    """The material of all cells."""

    tokenizer: Tokenizer
    vocabulary: Int[Tensor, " V"]  # ordinary tokens
    filler: Int[Tensor, " S"]  # a text of few sentences, to be repeated
    haystack: Int[Tensor, " T"]  # a long text, to hide the needle in
    max_positions: int
    trials: int
    seed: int

    def generator(self, stream: str) -> torch.Generator:
        """One stream per cell, so that no cell depends on what another one drew."""
        return torch.Generator().manual_seed(random.Random(f"{stream} {self.seed}").getrandbits(63))


@dataclass(frozen=True)
class Trials:
    """The rows of one cell. `question` is the 1-based number of the question whose answer a token belongs to, else 0.

    Every row has the same questions. Rows shorter than the longest are padded at the end, where nothing looks.
    """

    input_ids: Int[Tensor, "N L"]
    question: Int[Tensor, "N L"]
    chance: float  # share right of blind guessing


@dataclass(frozen=True)
class RetrievalTask:
    """A kind of question; `make(setting, distance, column value)` gives None where the cell is impossible."""

    name: str
    words: str
    columns: str
    column_values: tuple[Column, ...]
    make: Callable[[Setting, int, Column], Trials | None]


@dataclass(frozen=True)
class RetrievalTest:
    """A task's grid for one tokenizer, window and number of positions; cells that do not fit are left out."""

    task: RetrievalTask
    window_size: int
    cells: dict[Cell, Trials]
    count: int

    @property
    def row_values(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(distance for distance, _ in self.cells))

    @property
    def beyond(self) -> list[Cell]:
        return [cell for cell in self.cells if cell[0] > self.window_size]


@dataclass(frozen=True)
class Retrieval:
    """One task: who is right how often, and how much of the teacher's ability beyond the window the student has.

    `teacher_share` and `student_share` are over all cells beyond the window; None where there are too few, or no
    teacher. `floor`: what is right without reading beyond the window, in `models["window"]` or, where that was not
    measured, by blind guessing. `recovery`: None where the teacher does not beat it for certain.
    """

    name: str
    words: str
    rows: str
    columns: str
    row_values: tuple[int, ...]
    column_values: tuple[Column, ...]
    count: int
    models: dict[str, list[list[float | None]]]
    teacher_share: Interval | None
    student_share: Interval | None
    floor: float | None
    recovery: Interval | None

    def __post_init__(self) -> None:
        if self.row_values and not self.column_values:
            raise ValueError("column_values: expected one or more, found none")
        for name, shares in self.models.items():
            require_shape(name, shares, len(self.row_values), len(self.column_values))


# --- making the rows --------------------------------------------------------------------------------------------------


def retrieval_tests(
    tokenizer: Tokenizer,
    *,
    window_size: int,
    max_positions: int,
    trials: int = 8,
    seed: int = 0,
    haystack: Int[Tensor, "N L"] | None = None,
) -> list[RetrievalTest]:
    """The tests of `TASKS`, the same for every model that uses this tokenizer.

    Args:
        window_size: what counts as "beyond the window".
        max_positions: no row is longer.
        trials: rows per cell; more, where one distance beyond the window would leave too few for an interval.
        haystack: token ids of held-out text to hide the needle in; without it, the pass key's filler.

    """
    far = sum(distance > window_size for distance in distances(window_size, max_positions))
    trials = max(trials, -(-ENOUGH // max(1, far)))
    excluded = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    filler = torch.tensor(encode(tokenizer, _FILLER))
    text = filler if haystack is None else haystack.cpu().flatten()
    text = text[~torch.isin(text, torch.tensor(sorted(excluded), dtype=torch.int64))]
    vocabulary = ordinary_tokens(len(tokenizer), excluded)
    setting = Setting(tokenizer, vocabulary, filler, text if len(text) else filler, max_positions, trials, seed)
    tests: list[RetrievalTest] = []
    for task in TASKS:
        cells = product(distances(window_size, max_positions), task.column_values)
        made = {cell: found for cell in cells if (found := task.make(setting, *cell)) is not None}
        tests.append(RetrievalTest(task, window_size, made, trials))
    return tests


def distances(window_size: int, max_positions: int) -> tuple[int, ...]:
    """Half the window; then 2, 4, 8 and 16 windows where they leave room, or else the one distance in between."""
    beyond = [window_size * 2**i for i in range(1, 5) if window_size * 2**i <= max_positions * 3 // 4]
    within = [window_size // 2] if window_size // 2 > 0 else []
    return (*within, *(beyond or [(window_size + max_positions) // 2]))


def _passkey(setting: Setting, distance: int, depth: Column) -> Trials | None:
    return _hidden(setting, setting.filler, "The pass key is", range(10_000, 100_000), distance, depth)


def _needle(setting: Setting, distance: int, depth: Column) -> Trials | None:
    things = [f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS]
    return _hidden(setting, setting.haystack, "The box holds a", things, distance, depth)


def _hidden(
    setting: Setting, filler: Int[Tensor, " S"], cue: str, answers: Sequence[str | int], distance: int, depth: Column
) -> Trials | None:
    """Filler with a line "`cue` answer" hidden in it, and at the end the line "`cue`", for the model to complete.

    `depth` is the share of the filler that stands before the hidden line. Filler is cut between tokens, so that the
    distance is exact whatever the tokenizer; a base model needs no more than to see that a line begins again.
    """
    generator = setting.generator(f"{cue} {distance} {depth}")
    rows: list[list[int]] = []
    questions: list[list[int]] = []
    start = opening_tokens(setting.tokenizer)
    _, newline = split_tokens(setting.tokenizer, "a", "\n")
    for index in torch.randint(len(answers), (setting.trials,), generator=generator).tolist():
        asked, told = split_tokens(setting.tokenizer, cue, f" {answers[index]}")
        line = [*newline, *asked]
        after = distance - len(told) - len(newline) - len(line)
        if after < 0 or not told:
            return None
        before = round(after * depth / (1 - depth))
        first = int(torch.randint(len(filler), (), generator=generator))
        text = filler[(first + torch.arange(before + after)) % len(filler)].tolist()
        rows.append([*start, *text[:before], *line, *told, *newline, *text[before:], *line, *told])
        questions.append([0] * (len(rows[-1]) - len(told)) + [1] * len(told))
    length = max(map(len, rows))
    if length > setting.max_positions:
        return None
    input_ids = [row + row[-1:] * (length - len(row)) for row in rows]
    question = [row + [0] * (length - len(row)) for row in questions]
    return Trials(torch.tensor(input_ids), torch.tensor(question), chance=1 / len(answers))


def _associative_recall(setting: Setting, distance: int, pairs: Column) -> Trials | None:
    """Pairs of random tokens, filler, and `distance` after their start every second pair again.

    The tokens of the pairs differ from each other, and filler is none of them: after each key, one answer is right.
    """
    place = torch.arange(2 * int(pairs))
    # Every second pair is not asked for. Filler in its place keeps all distances the same, and leaves nothing but the
    # key to tell the answer: in a plain repetition, the pair before would tell it too.
    again, question = place // 2 % 2 == 0, torch.where(place % 4 == 1, place // 4 + 1, 0)
    vocabulary, size = setting.vocabulary, len(question)
    start = opening_tokens(setting.tokenizer)
    too_long = len(start) + distance + size > setting.max_positions
    if too_long or distance < size or len(vocabulary) < 2 * size:
        return None
    generator = setting.generator(f"{question.tolist()} {distance}")
    shuffled = torch.stack([torch.randperm(len(vocabulary), generator=generator) for _ in range(setting.trials)])
    index = torch.randint(size, len(vocabulary), (setting.trials, distance), generator=generator)
    told, filler = vocabulary[shuffled[:, :size]], vocabulary[shuffled.gather(1, index)]
    asked = torch.where(again, told, filler[:, -size:])
    opening = torch.tensor(start, dtype=torch.int64).expand(setting.trials, -1)
    input_ids = torch.cat([opening, told, filler[:, : distance - size], asked], dim=1)
    numbered = torch.zeros_like(input_ids)
    numbered[:, -size:] = question
    return Trials(input_ids, numbered, chance=1 / len(vocabulary))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # verbose=False: no warning about texts longer than the model's context, they are cut.
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]


def opening_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the token that opens a text (BOS); none where the tokenizer has none."""
    return [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]  # type: ignore[arg-type]


def split_tokens(tokenizer: Tokenizer, before: str, after: str) -> tuple[list[int], list[int]]:
    """The tokens of `before + after` in two parts; one that reaches across the border belongs to the second."""
    whole, alone = encode(tokenizer, before + after), encode(tokenizer, before)
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(whole, alone, strict=False))))
    return whole[:common], whole[common:]


# The pass key: Mohtashami and Jaggi, arXiv 2305.16300. Associative recall with many questions: Zoology, arXiv
# 2312.04927; a model that was not trained for it can only do it by induction, so the format is the plainest there is.
_DEPTH = "depth: the share of the filler before it (0: the text begins with it)"
_PASSKEY = f"a five-digit number on its own line in filler text, and a question for it at the end; {_DEPTH}"
_NEEDLE = f"a line of words in other text, and a question for its last two words at the end; {_DEPTH}"
_RECALL = (
    "pairs of random tokens, key and value, then random filler; then every second key again, each to be followed by "
    "its value; pairs: how many there are to keep apart"
)
TASKS = (
    RetrievalTask("passkey", _PASSKEY, "depth", (0.0, 0.5), _passkey),
    RetrievalTask("needle", _NEEDLE, "depth", (0.0, 0.5), _needle),
    RetrievalTask("associative_recall", _RECALL, "pairs", (4, 16), _associative_recall),
)


# --- answers ----------------------------------------------------------------------------------------------------------


def answer(model: nn.Module, test: RetrievalTest, *, batch_size: int, title: str = "retrieval") -> Answers:
    """Run one model over all cells of a test, `batch_size` trials per forward pass; processes share the batches.

    Raises:
        FloatingPointError: the model gives logits that are not a number.
    """
    shares = {cell: torch.zeros(len(trials.question), dtype=torch.float64) for cell, trials in test.cells.items()}
    work = [(cell, some) for cell, share in shares.items() for some in torch.arange(len(share)).split(batch_size)]
    with inference(model) as device:
        for number, counts in progress(shard_batches(work), f"{title}: {test.task.name}"):
            cell, some = work[number]
            trials = test.cells[cell]
            right = _share_right(model, trials.input_ids[some].to(device), trials.question[some])
            if counts:
                shares[cell][some] = right
    return {cell: put_together(share) for cell, share in shares.items()}


def _share_right(model: nn.Module, input_ids: Int[Tensor, "B L"], question: Int[Tensor, "B L"]) -> Float[Tensor, " B"]:
    """A question is right where all tokens of its answer are."""
    first = int((question > 0).any(dim=0).nonzero()[0])
    asked = input_ids.shape[1] - first
    positions = torch.arange(input_ids.shape[1] - 1, device=input_ids.device).expand(len(input_ids), -1)
    # Logits from the first question on only: those of a whole text, times the vocabulary, would fill the memory.
    output = model(input_ids=input_ids[:, :-1], position_ids=positions, use_cache=False, logits_to_keep=asked)
    logits = output.logits[:, -asked:]
    if logits.isnan().any():
        raise FloatingPointError("retrieval: the model's logits are not numbers")
    wrong = (logits.argmax(dim=-1) != input_ids[:, first:]).cpu().double()
    errors = torch.zeros(len(question), int(question.max()) + 1, dtype=torch.float64)
    errors.scatter_add_(1, question[:, first:], wrong)
    return (errors[:, 1:] == 0).double().mean(dim=1)


# --- comparing --------------------------------------------------------------------------------------------------------


def retrieval_result(
    test: RetrievalTest, answers: Mapping[str, Answers], *, samples: int = 1000, seed: int = 0
) -> Retrieval:
    """Models side by side, and the share of the teacher's ability beyond the window that the student has.

    recovery = (student - floor) / (teacher - floor), over all trials beyond the window. The floor is the
    teacher confined to its window ("window", the untrained control), or blind guessing where that was not measured.

    Args:
        answers: of every candidate, by name, all to the same test; "student" must be among them.
    """
    task = test.task
    tables = {}
    for name, given in answers.items():
        mean = {cell: share.mean().item() for cell, share in given.items()}
        tables[name] = [[mean.get((row, column)) for column in task.column_values] for row in test.row_values]
    axes = ("distance", task.columns, test.row_values, task.column_values)
    result = partial(Retrieval, task.name, task.words, *axes, test.count, tables)
    beyond = test.beyond
    if len(beyond) * test.count < ENOUGH:
        return result(None, None, None, None)

    names = [name for name in ("student", "teacher", "window") if name in answers]
    columns = [torch.cat([answers[name][cell] for cell in beyond]) for name in names]
    means, draws = resample([Totals.of_each(x) for x in columns], samples=samples, seed=seed)
    mean, draw = dict(zip(names, means, strict=True)), dict(zip(names, draws.T, strict=True))
    share = {name: Interval.of(mean[name], draw[name]) for name in names}
    student, teacher = share["student"], share.get("teacher")
    if teacher is None:
        return result(None, student, None, None)

    guessing = torch.tensor(sum(test.cells[cell].chance for cell in beyond) / len(beyond), dtype=torch.float64)
    floor, floor_draw = mean.get("window", guessing), draw.get("window", guessing)
    above = Interval.of(mean["teacher"] - floor, draw["teacher"] - floor_draw)
    if above.low <= NEGLIGIBLE:
        return result(teacher, student, floor.item(), None)
    # The few draws where the teacher happens to be no better than the floor would divide by zero.
    gain = (draw["teacher"] - floor_draw).clamp(min=NEGLIGIBLE)
    recovery = Interval.of((mean["student"] - floor) / (mean["teacher"] - floor), (draw["student"] - floor_draw) / gain)
    return result(teacher, student, floor.item(), recovery)
