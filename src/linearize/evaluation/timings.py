"""Records of seconds and bytes of generation, and the lengths at which two models are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from linearize.hf.teacher import break_even_tokens


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Speed:
    """One model that generates `new_tokens` tokens after each of `batch_size` prompts of `prompt_length` tokens."""

    model: str
    prompt_length: int
    prefill: Spread  # seconds for all prompts together
    decode: Spread  # seconds per step, which gives every sequence one token
    cache_bytes: int  # held after prompts and generated tokens, by all sequences together
    batch_size: int = 1
    new_tokens: int = 1
    prefill_bytes: int | None = None  # peak during the prefill, including the cache
    compiling: float | None = None  # seconds of the first, uncounted step; None: steps are not compiled


@dataclass(frozen=True)
class Crossover:
    """Lengths from which the student is faster than its teacher, for one batch size.

    They are interpolated between the medians at measured lengths. None: the student is not faster at the longest.
    """

    prefill: int | None  # tokens of the prompt
    decode: int | None  # tokens in the context; half of the generated ones count

    @classmethod
    def of(cls, speeds: Sequence[Speed]) -> Crossover:
        """Compute the crossover from measurements of "teacher" and "student" at the same lengths and batch size."""
        models = [[s for s in speeds if s.model == model] for model in ("student", "teacher")]
        prefill = ({s.prompt_length: s.prefill.median for s in model} for model in models)
        decode = ({s.prompt_length + s.new_tokens // 2: s.decode.median for s in model} for model in models)
        return cls(even(*prefill), even(*decode))


@dataclass(frozen=True)
class Bench:
    """Measurements over batch sizes and lengths, and the crossover of each batch size."""

    speed: list[Speed]
    crossovers: dict[int, Crossover]
    repeats: int
    seed: int
    setting: str  # device, dtype, version of torch

    def to_json(self) -> dict[str, object]:
        """Return plain data, with the crossovers as a list, each with its batch size."""
        crossovers = [{"batch_size": size} | asdict(found) for size, found in self.crossovers.items()]
        contents: dict[str, object] = asdict(self)
        return contents | {"crossovers": crossovers}


def even(ours: Mapping[int, float], theirs: Mapping[int, float]) -> int | None:
    """Return the length from which `ours` stays below `theirs`, interpolated between the curves' common lengths.

    It is the shortest length if ours is always below; None: ours is not below at the longest.
    """
    lengths = sorted(ours)
    gaps = [ours[length] - theirs[length] for length in lengths]
    slower = [i for i, gap in enumerate(gaps) if gap >= 0]
    if not slower:
        return lengths[0]
    last = slower[-1]
    if last == len(lengths) - 1:
        return None
    share = gaps[last] / (gaps[last] - gaps[last + 1])
    return round(lengths[last] + share * (lengths[last + 1] - lengths[last]))


def growth(held: Mapping[int, int]) -> int:
    """Return the bytes by which a cache grows per token, from its bytes after several numbers of tokens."""
    short, long = min(held), max(held)
    return (held[long] - held[short]) // (long - short)


def memory_break_even(student: Mapping[int, int], teacher: Mapping[int, int]) -> int | None:
    """Return the number of tokens from which the student's cache is smaller than the teacher's; None: never.

    Args:
        student, teacher: number of tokens -> bytes of the cache, for two or more equal numbers.
    """
    longest, grows = max(student), (growth(teacher), growth(student))
    at_first = student[longest] - teacher[longest] + (grows[0] - grows[1]) * longest
    return break_even_tokens(at_first, *grows)
