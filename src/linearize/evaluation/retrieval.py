"""Test whether a model can retrieve facts from within the window and from beyond it.

Each test is a grid of cells: rows are distances, columns depend on the task. `retrieval_tests` makes the token rows of
every cell once; `answer` runs one model on them; `retrieval_result` compares the models. `copying` has a further test.

In every task the answer is in the text twice, in the fact and after the question. The distance is the number of tokens
from one to the other. So the query that has to predict it is `distance` - 1 tokens after it, and a distance greater
than the window is beyond the window of one layer (several layers with windows reach a little further).

No text is generated. An answer counts as right if each of its tokens is the most likely one, given the right ones
before: these are the answers of greedy decoding.

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
from linearize.distributed import all_reduce_sum, shard_batches
from linearize.evaluation.intervals import Interval, Totals, require_shape, resample

# If the teacher exceeds the floor by less than this, the student's share of the difference has no meaning.
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
    """The texts, sizes and seed of all cells."""

    tokenizer: Tokenizer
    vocabulary: Int[Tensor, " V"]  # ordinary tokens
    filler: Int[Tensor, " S"]  # a text of a few sentences, which is repeated
    haystack: Int[Tensor, " T"]  # a long text in which the needle is hidden
    max_positions: int
    trials: int
    seed: int

    def generator(self, stream: str) -> torch.Generator:
        """Return a generator for a stream; each cell has its own stream, so cells do not depend on each other."""
        return torch.Generator().manual_seed(random.Random(f"{stream} {self.seed}").getrandbits(63))


@dataclass(frozen=True)
class Trials:
    """The rows of one cell.

    `question` is the number, from 1, of the question whose answer contains the token, else 0. Every row has the same
    questions. Shorter rows are padded at the end, which no answer reads.
    """

    input_ids: Int[Tensor, "N L"]
    question: Int[Tensor, "N L"]
    chance: float  # share right of blind guessing


@dataclass(frozen=True)
class RetrievalTask:
    """A kind of question; `make(setting, distance, column value)` returns None if the cell is impossible."""

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
    """The result of one task.

    Attributes:
        models: by model, the share of right answers by row and column.
        teacher_share, student_share: of right answers over all cells beyond the window; None: there are too few, or no
            teacher.
        floor: share of right answers without reading beyond the window: that of the window-only control, or of blind
            guessing if it was not measured.
        recovery: share of the teacher's ability above the floor that the student has; None: the interval of the
            teacher's does not exclude a negligible one.
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
    """Return the tests of `TASKS`, equal for all models with this tokenizer.

    Args:
        window_size: in tokens, for results "beyond the window".
        max_positions: the most tokens of a row.
        trials: rows per cell; more if an interval beyond the window needs them.
        haystack: token ids of held-out text in which the needle is hidden; None: the pass key's filler.
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
    """Return half the window; then 2, 4, 8 and 16 windows if they fit, else one distance beyond the window."""
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
    """Return filler with a hidden line "`cue` answer", followed by the line "`cue`", which the model has to complete.

    `depth` is the share of the filler before the hidden line. Filler is cut between tokens, so that the distance is
    exact for every tokenizer.
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
    """Return pairs of random tokens, filler, and every second pair again, `distance` tokens after their start.

    All tokens of the pairs differ, and filler has none of them, so each key has one right answer.
    """
    place = torch.arange(2 * int(pairs))
    # Filler in place of every second pair keeps all distances equal. In a plain repetition, the pair before a key would
    # also predict the answer.
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
    """Return the token that opens a text (BOS), in a list; empty if the tokenizer has none."""
    return [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]  # type: ignore[arg-type]


def split_tokens(tokenizer: Tokenizer, before: str, after: str) -> tuple[list[int], list[int]]:
    """Return the tokens of `before + after` in two parts; a token across the border belongs to the second."""
    whole, alone = encode(tokenizer, before + after), encode(tokenizer, before)
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(whole, alone, strict=False))))
    return whole[:common], whole[common:]


# The pass key: Mohtashami and Jaggi, arXiv 2305.16300. Associative recall with many questions: Zoology, arXiv
# 2312.04927; models that were not trained for it need induction, so the format is as simple as possible.
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
        FloatingPointError: a logit is NaN.
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
    return {cell: all_reduce_sum(share) for cell, share in shares.items()}


def _share_right(model: nn.Module, input_ids: Int[Tensor, "B L"], question: Int[Tensor, "B L"]) -> Float[Tensor, " B"]:
    """Return each row's share of questions for which all tokens of the answer are right."""
    first = int((question > 0).any(dim=0).nonzero()[0])
    asked = input_ids.shape[1] - first
    positions = torch.arange(input_ids.shape[1] - 1, device=input_ids.device).expand(len(input_ids), -1)
    # Logits from the first question on only: those of a whole text would need too much memory.
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
    """Compare models, and compute the share of the teacher's ability beyond the window that the student has.

    recovery = (student - floor) / (teacher - floor), over all trials beyond the window. The floor is the teacher with a
    window only ("window", the untrained control), or blind guessing if that was not measured.

    Args:
        answers: by candidate, to the same test; "student" must be among them.
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
    # In a few draws the teacher may be no better than the floor; the clamp avoids a division by zero.
    gain = (draw["teacher"] - floor_draw).clamp(min=NEGLIGIBLE)
    recovery = Interval.of((mean["student"] - floor) / (mean["teacher"] - floor), (draw["student"] - floor_draw) / gain)
    return result(teacher, student, floor.item(), recovery)
