"""Compare attention sinks with one window at equal bytes, nothing trained.

    python experiments/memory/sinks.py HuggingFaceTB/SmolLM2-135M-Instruct --text wikipedia.txt --output OUTPUT.json

Every head of the teacher gets the same window and one form of sink, in 20, 11 and 6 % of the teacher's cache at the
rows' length:

    kept tokens   the first 1 or 4 tokens of a document stay; the window is so many tokens shorter
    sink logit    a term exp(b) per query head in the softmax denominator, without a value and without bytes of state

The logit b of a head is computed from the teacher, in one of two ways:

    mass    the logit gets, on average over queries, the share of attention that the first token has among itself and
            the keys that are kept: mean sigmoid(b - l) = mean sigmoid(s - l), where l is the log-sum-exp of the kept
            keys' logits and s the first token's logit
    error   the logit that minimises sum |sigmoid(l - b) o - y|^2 over queries, where o is the attention output over
            the kept keys and y the teacher's

"later queries" means that the logit applies to queries that no longer see all of their keys; "all queries", that it
applies everywhere, as in gpt-oss. The fit is on the first three quarters of the text, the measurement on the last one:
the cross-entropy of tokens at positions of 256 and more in their row, minus the teacher's.

Writes OUTPUT.json, a table (.md) and a figure (.svg) beside it. The same command again resumes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from torch import Tensor
from transformers import PreTrainedModel

from linearize.base import UserError, progress, read_json
from linearize.configs.data import DataConfig
from linearize.configs.spans import SlidingSpan
from linearize.data.rows import PackedRows
from linearize.data.sources import read_rows
from linearize.data.splits import ENOUGH
from linearize.evaluation.intervals import Interval, Totals, resample
from linearize.evaluation.perplexity import TokenLosses, token_losses
from linearize.hf.attention import Observer, observed, softmax_output
from linearize.hf.checkpoint import load_model, load_tokenizer, read_config
from linearize.hf.convert import convert_layers
from linearize.hf.teacher import TeacherShape
from linearize.mixers.inputs import AttnInputs
from linearize.ops.backend import window_softmax
from linearize.ops.heads import repeat_kv
from linearize.ops.inputs import SoftmaxInputs
from linearize.ops.layout import SequenceLayout
from linearize.ops.partial import Partial
from linearize.run.folder import versions, write_json
from linearize.training.memory import head_mixer

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import COLOURS, MARKERS, draw
from pages import write_page

SHARES = (0.20, 0.11, 0.06)  # of the teacher's cache
FIRST_POSITION = 256  # of the tokens that are measured
Logits = dict[int, Float[Tensor, " H"]]  # by layer


@dataclass(frozen=True)
class Form:
    """One form of sink.

    Attributes:
        tokens: how many first tokens of a document stay, out of the same bytes.
        logit: how the sink logit is computed; None: there is none.
        all_queries: whether it applies to queries that still see all of their keys, too.
    """

    name: str
    tokens: int = 0
    logit: Literal["mass", "error"] | None = None
    all_queries: bool = False


FORMS = (
    Form("no sinks"),
    Form("first token", 1),
    Form("first 4 tokens", 4),
    Form("logit (mass), all queries", 0, "mass", True),
    Form("logit (error), all queries", 0, "error", True),
    Form("logit (error), later queries", 0, "error"),
    Form("first token + logit (error), all queries", 1, "error", True),
    Form("first token + logit (error), later queries", 1, "error"),
    Form("first 4 tokens + logit (error), later queries", 4, "error"),
)


# --- attention --------------------------------------------------------------------------------------------------------


def kept_keys(inputs: AttnInputs, span: SlidingSpan) -> Partial:
    """Return the softmax sums over the keys that are kept, of rows that are one document each."""
    layout = SequenceLayout.full(inputs.q.shape[2], inputs.q.device)
    given = inputs.q, inputs.k, inputs.v, span, layout, inputs.scaling, inputs.softcap
    return window_softmax(SoftmaxInputs(*given))


def with_logit(sums: Partial, logit: Float[Tensor, "#B H #T"]) -> Float[Tensor, "B H T D"]:
    """Return num / (den + exp(logit)), of sums that stand for themselves times exp(log_scale)."""
    top = torch.maximum(sums.log_scale, logit)
    scale = (sums.log_scale - top).exp()
    return sums.num * scale[..., None] / (sums.den * scale + (logit - top).exp())[..., None]


def output(
    inputs: AttnInputs, span: SlidingSpan, logit: Float[Tensor, " H"] | None, all_queries: bool
) -> Float[Tensor, "B H T D"]:
    """Return the attention output of one layer with a window and sinks."""
    sums = kept_keys(inputs, span)
    if logit is None:
        return sums.num / sums.den[..., None]
    applies = later_queries(inputs.q.shape[2], span).to(logit.device) | all_queries
    return with_logit(sums, torch.where(applies, logit[:, None], -torch.inf)[None])


def later_queries(length: int, span: SlidingSpan) -> Bool[Tensor, " T"]:
    """Return which queries no longer see all of their keys."""
    return torch.arange(length) >= span.window_size + span.sinks


def observer_of(span: SlidingSpan, form: Form, logits: Logits) -> Observer:
    """Return what computes the attention of every layer with a window and one form of sink."""

    def observe(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        logit = logits[layer.layer_idx].to(inputs.q.device) if form.logit else None
        return output(inputs, span, logit, form.all_queries)

    return observe


# --- sink logits ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fitted_logits(
    model: PreTrainedModel, rows: PackedRows, spans: Sequence[SlidingSpan], forms: Sequence[Form]
) -> list[Logits]:
    """Compute the sink logits of each pair of a span and a form, all in one forward pass of the teacher over the rows.

    Args:
        forms: with `logit` set.
    """
    statistics: dict[tuple[SlidingSpan, int], list[Tensor]] = {}

    def watch(layer: Any, inputs: AttnInputs, layout: SequenceLayout | None) -> Tensor:
        y = softmax_output(layer, inputs, layout)
        first = first_logits(inputs)
        for span in dict.fromkeys(spans):
            sums = kept_keys(inputs, span)
            o = sums.num / sums.den[..., None]
            numbers = sums.log_scale + sums.den.log(), (o * y).sum(-1), o.square().sum(-1), first
            statistics.setdefault((span, layer.layer_idx), []).append(torch.stack(numbers)[:, 0])
        return y

    with observed(model, watch):
        for row in progress(rows.input_ids, "sink logits"):
            model(row[None].to(model.device), use_cache=False)
    found: list[Logits] = [{} for _ in spans]
    for (span, layer), parts in statistics.items():
        log_sum, oy, oo, first = torch.cat(parts, dim=-1).cpu()
        later = later_queries(rows.input_ids.shape[1], span).repeat(len(parts))
        for place, form in enumerate(forms):
            if spans[place] == span and form.logit == "mass":
                found[place][layer] = by_mass(log_sum[:, later], first[:, later])
            elif spans[place] == span:
                queries = later | form.all_queries
                found[place][layer] = by_error(log_sum[:, queries], oy[:, queries], oo[:, queries])
    return found


def first_logits(inputs: AttnInputs) -> Float[Tensor, "B H T"]:
    """Return each query's logit of the first token."""
    scores = inputs.scaling * (inputs.q * repeat_kv(inputs.k[:, :, :1], inputs.q.shape[1])).sum(-1)
    return scores if inputs.softcap is None else inputs.softcap * torch.tanh(scores / inputs.softcap)


def by_mass(log_sum: Float[Tensor, "H N"], first: Float[Tensor, "H N"]) -> Float[Tensor, " H"]:
    """Solve mean sigmoid(b - log_sum) = mean sigmoid(first - log_sum) for b, by bisection."""
    share = (first - log_sum).sigmoid().mean(-1)
    low, high = ((first - log_sum).amin(-1) + log_sum.amin(-1)), ((first - log_sum).amax(-1) + log_sum.amax(-1))
    for _ in range(60):
        middle = (low + high) / 2
        more = (middle[:, None] - log_sum).sigmoid().mean(-1) < share
        low, high = torch.where(more, middle, low), torch.where(more, high, middle)
    return (low + high) / 2


def by_error(log_sum: Float[Tensor, "H N"], oy: Float[Tensor, "H N"], oo: Float[Tensor, "H N"]) -> Float[Tensor, " H"]:
    """Minimise sum (c^2 o.o - 2 c o.y) over b, where c = sigmoid(log_sum - b), in steps of 0.1 around the mean."""
    candidates = log_sum.mean(-1, keepdim=True) + torch.arange(-15, 10, 0.1)
    errors = []
    for b in candidates.unbind(-1):
        c = (log_sum - b[:, None]).sigmoid()
        errors.append((c.square() * oo - 2 * c * oy).sum(-1))
    return candidates.gather(1, torch.stack(errors, dim=-1).argmin(-1, keepdim=True)).squeeze(-1)


# --- measurement ------------------------------------------------------------------------------------------------------


def text_rows(model: str, text: Path, length: int, fit: int, measured: int) -> tuple[PackedRows, PackedRows]:
    """Cut a text into rows to fit on, from its first three quarters, and rows to measure on, from its last one.

    Each row is a document, which begins with what the tokenizer puts before a text, if it does.

    Raises:
        UserError: no such file, or one with too few tokens.
    """
    if not text.is_file():
        raise UserError(f"--text: expected a file of text, found none at {text}; check the path")
    tokenizer = load_tokenizer(model)
    start = tokenizer("").input_ids[:1]
    documents = (row.get("text", "") for _, row in read_rows(DataConfig(dataset=str(text))))
    ids = [token for document in documents for token in tokenizer(document, verbose=False).input_ids]
    size, cut = length - len(start), len(ids) * 3 // 4
    parts = []
    for name, part, count in (("fit", ids[:cut], fit), ("measure", ids[cut:], measured)):
        if len(part) < count * size:
            raise UserError(
                f"--text: expected at least {count * size} tokens to {name} on, found {len(part)} in that part of "
                f"{text}; give a longer text"
            )
        # From all of the part alike.
        begins = torch.linspace(0, len(part) - size, count).long().tolist()
        rows = torch.tensor([[*start, *part[begin : begin + size]] for begin in begins])
        positions = torch.arange(length).expand(count, -1)
        parts.append(PackedRows(rows, positions, rows.masked_fill(positions == 0, -100)))
    return parts[0], parts[1]


class Sinks:
    """The comparison on one teacher."""

    def __init__(self, args: argparse.Namespace) -> None:
        shape = TeacherShape.from_config(read_config(args.model))
        self.length = min(shape.max_positions, args.length)
        if self.length <= FIRST_POSITION or args.rows < ENOUGH:
            raise UserError(
                f"--length, --rows: expected more than {FIRST_POSITION} positions and at least {ENOUGH} rows, found "
                f"{self.length} and {args.rows}"
            )
        self.fit, self.rows = text_rows(args.model, args.text, self.length, args.fit_rows, args.rows)
        teacher = load_model(args.model, dtype=torch.float32, device=torch.device(args.device))
        sliding = set(shape.sliding_layers)
        plan = tuple(None if index in sliding else head_mixer(1, 0, 0) for index in range(shape.num_layers))
        self.model = convert_layers(teacher, plan).eval()

    def span(self, share: float, form: Form) -> SlidingSpan:
        """Return the window and the kept tokens, which together are `share` of the teacher's cache."""
        return SlidingSpan(window_size=int(share * self.length) - form.tokens, sinks=form.tokens)

    def losses(self, observer: Observer, title: str) -> TokenLosses:
        """Measure the model with attention outputs that `observer` gives."""
        with observed(self.model, observer):
            measured = token_losses(self.model, self.rows, batch_size=1, title=title)
        return measured.where(measured.position >= FIRST_POSITION)

    def measure(self, args: argparse.Namespace) -> dict[str, Any]:
        """Measure what OUTPUT does not hold yet, write each number when it is there, and return all of them."""
        setting = {"model": args.name or args.model, "text": args.text.name, "length": self.length}
        setting |= {"rows": args.rows, "fit_rows": args.fit_rows, "from_position": FIRST_POSITION}
        found: dict[str, Any] = {"command": args.command, "setting": setting, "versions": versions(), "losses": {}}
        if args.output.exists():
            before = read_json(args.output)
            if before.get("setting") != setting:
                raise UserError(
                    f"--output: expected numbers with {setting}, found others in {args.output}; name another file"
                )
            found["losses"] = before["losses"]
        losses = found["losses"]

        def keep(name: str, measured: TokenLosses) -> None:
            losses[name] = [round(x, 6) for x in by_row(measured)]
            write_json(args.output, found)

        if "teacher" not in losses:
            keep("teacher", self.losses(softmax_output, "teacher"))
        jobs = [(share, form) for share in SHARES for form in FORMS if key(share, form) not in losses]
        fitted = [(share, form) for share, form in jobs if form.logit]
        logits: dict[str, Logits] = {}
        if fitted:
            spans = [self.span(*job) for job in fitted]
            all_logits = fitted_logits(self.model, self.fit, spans, [form for _, form in fitted])
            logits = {key(*job): x for job, x in zip(fitted, all_logits, strict=True)}
        for share, form in progress(jobs, "forms of sinks"):
            name = key(share, form)
            observer = observer_of(self.span(share, form), form, logits.get(name, {}))
            keep(name, self.losses(observer, name))
        return found


def key(share: float, form: Form) -> str:
    """Return the name of a row of the table."""
    return f"{share:.0%}, {form.name}"


def by_row(measured: TokenLosses) -> list[float]:
    """Return the mean loss of each row; all rows count as many tokens."""
    return ((measured.loss * measured.mask).double().sum(1) / measured.mask.sum(1)).tolist()


def difference(losses: dict[str, list[float]], name: str, other: str) -> Interval:
    """Return the mean of one form's losses minus another's, with its paired bootstrap interval over rows."""
    columns = [torch.tensor(losses[x], dtype=torch.float64) for x in (name, other)]
    mean, draws = resample([Totals(x, torch.ones_like(x)) for x in columns])
    return Interval.of(mean[0] - mean[1], draws[:, 0] - draws[:, 1])


# --- the page ---------------------------------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    """Return the table in Markdown."""
    setting, losses = found["setting"], found["losses"]
    teacher = sum(losses["teacher"]) / len(losses["teacher"])
    lines = [
        f"# Sinks with one window, at equal bytes: {setting['model']}",
        "",
        f"Nothing trained. Every head has the same window; the share is that of the teacher's cache at "
        f"{setting['length']:,} tokens. Measured: cross-entropy minus the teacher's ({teacher:.3f} nats) of tokens at "
        f"positions {setting['from_position']} and more, on {setting['rows']} held-out rows of {setting['length']:,} "
        f"tokens ({setting['text']}), with 95 % paired bootstrap intervals over rows. Sink logits are computed on "
        f"{setting['fit_rows']} other rows; the script says how.",
        "",
        "| of the cache | sinks | window | minus teacher, nats | minus no sinks, nats |",
        "| --- | --- | --- | --- | --- |",
    ]
    for share in SHARES:
        for form in FORMS:
            size = int(share * setting["length"]) - form.tokens
            name, none = key(share, form), key(share, FORMS[0])
            worse = _nats(difference(losses, name, "teacher"))
            gain = "" if form == FORMS[0] else _nats(difference(losses, name, none))
            lines.append(f"| {share:.0%} | {form.name} | {size} | {worse} | {gain} |")
    return "\n".join([*lines, "", f"    {found['command']}", ""])


def _nats(x: Interval) -> str:
    return f"{x.mean:+.3f} [{x.low:+.3f}, {x.high:+.3f}]"


def figure(path: Path, found: dict[str, Any]) -> None:
    """Draw the table: a line per form over the share of the cache."""
    losses = found["losses"]
    shown = [form for form in FORMS if not (form.all_queries and form.tokens)]

    def paint(axes: Sequence[Axes]) -> None:
        axis = axes[0]
        for number, form in enumerate(shown):
            points = [difference(losses, key(share, form), "teacher") for share in SHARES]
            means = [x.mean for x in points]
            bars = [[x.mean - x.low for x in points], [x.high - x.mean for x in points]]
            shift = 1 + 0.02 * (number - len(shown) / 2)
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
            line = "-" if number < len(COLOURS) else "--"
            axis.errorbar([100 * share * shift for share in SHARES], means, bars, label=form.name, ls=line, **style)
        axis.set(xlabel="% of the teacher's cache", ylabel="loss minus teacher's, nats", xscale="log")
        ticks = [100 * share for share in SHARES]
        axis.set_xticks(ticks, [f"{x:.0f}" for x in ticks])
        axis.minorticks_off()
        axis.figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=8)

    draw(path, [found["setting"]["model"]], paint, width=6.5)


def options() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the teacher: a folder or hub id")
    parser.add_argument("--text", required=True, type=Path, help="a file of text (.txt, .md, .py, .jsonl)")
    parser.add_argument("--name", help="the model's name in the table, where MODEL is a folder: its hub id")
    parser.add_argument("--output", required=True, type=Path, help="the JSON to write")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row, as far as the teacher has positions")
    parser.add_argument("--rows", type=int, default=ENOUGH, help="held-out rows to measure on")
    parser.add_argument("--fit-rows", type=int, default=6, help="rows to compute sink logits on")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run the comparison and write its three files."""
    args = options().parse_args(arguments)
    output = args.output
    shown = [args.name or args.model, "--text", args.text.name, "--rows", args.rows, "--fit-rows", args.fit_rows]
    shown += ["--length", args.length, "--output", f"experiments/memory/sinks/{output.name}"]
    args.command = " ".join(map(str, ["python experiments/memory/sinks.py", *shown]))

    def measure() -> dict[str, Any]:
        output.parent.mkdir(parents=True, exist_ok=True)
        found = Sinks(args).measure(args)
        figure(output.with_suffix(".svg"), found)
        return found

    write_page(output, measure, page)


if __name__ == "__main__":
    main()
