"""Inside the layers: how well each head stands in for the softmax head it replaces, and what single heads look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from linearize.evaluation.attention_maps import AttentionMap
from linearize.evaluation.fidelity import Histogram, LayerFidelity, Pair
from linearize.report.figures import Cloud, clouds
from linearize.report.findings import errors, outliers
from linearize.report.heatmaps import Layout, Panel, Scale, heatmaps
from linearize.report.html import Block, Choice, Figure, Group, Picker, Section, Table, Text
from linearize.report.load import RunFiles
from linearize.report.missing import not_measured
from linearize.report.numbers import Number, count, number, share
from linearize.report.sections.grids import by_head, ends, grids
from linearize.report.svg import printable


@dataclass(frozen=True)
class Measure:
    """A number per query head: its name in the page's ids, its title and meaning, and how to read it."""

    key: str
    title: str
    meaning: str
    read: Callable[[LayerFidelity], Sequence[float] | None]


# The first is the error that the student feels.
MEASURES = (
    Measure(
        "output-relative",
        "Relative output error",
        "mean square error of a head's output, over the mean square of the teacher's",
        lambda layer: layer.output_relative,
    ),
    Measure(
        "weight-kl",
        "KL of attention weights",
        "KL(teacher || student) of a query's weights, nats",
        lambda layer: layer.weight_kl,
    ),
    Measure(
        "cosine",
        "Cosine of attention matrices",
        "of the student's matrix of weights with the teacher's; 1: alike",
        lambda layer: layer.cosine,
    ),
    Measure(
        "singular-values",
        "Distance of singular values",
        "of the two matrices of weights; 0: alike",
        lambda layer: layer.singular_values,
    ),
)
_PAIRS: dict[str, Callable[[LayerFidelity], Pair]] = {
    "entropy of weights, nats": lambda layer: layer.entropy,
    "monotonicity": lambda layer: layer.monotonicity,
    "effective length, tokens": lambda layer: layer.esl,
}


def fidelity(runs: Sequence[RunFiles]) -> Section:
    """Errors by layer and head, the worst heads by name, and properties of the weights beside the teacher's."""
    measured = [run for run in runs if run.results.fidelity]
    blocks: list[Block] = []
    for run in measured:
        found = outliers(run)
        blocks.append(Text(run.prefix + (found.words if found else "No head stands out.")))
    for measure in MEASURES:
        holders = [run for run in measured if any(map(measure.read, _layers(run)))]
        if holders:
            blocks.append(_errors(holders, measure))
    if measured:
        if (shapes := _shapes(measured)) is not None:
            blocks.append(shapes)
        words = "By what the linear state is multiplied at each step: the share of steps in each bin."
        blocks += _histograms(measured, "gates", "Gates", words, lambda layer: layer.gates)
        words = "What weighs the window beside the linear part: the share of heads in each bin."
        blocks += _histograms(measured, "mix", "Window factors", words, lambda layer: layer.mix)
    blocks += not_measured(runs, "fidelity")
    return Section(
        "fidelity",
        "Fidelity of each head",
        blocks,
        summary="How far each head's output and weights are from those of the softmax head it replaces."
        if measured
        else "",
    )


def _layers(run: RunFiles) -> list[LayerFidelity]:
    return [] if run.results.fidelity is None else run.results.fidelity.layers


def _errors(runs: Sequence[RunFiles], measure: Measure) -> Figure:
    title, higher_is_better = measure.title, measure.key == "cosine"
    panels, said = [], []
    for run in runs:
        panels.append(by_head(run.group or "", [(layer.layer, measure.read(layer)) for layer in _layers(run)]))
        found = ends(panels[-1])
        worst, best = found if higher_is_better else found[::-1]
        said.append(f"{run.name}: worst {worst[1]}, {number(worst[0])}; best {best[1]}, {number(best[0])}")
    values = [x for panel in panels for row in panel.values for x in row]
    scale = Scale.even(title, values, high=1.0) if higher_is_better else Scale.fitting(title, values)
    name, words, axes = f"fidelity-{measure.key}", "; ".join(said), ("layer", "head")
    figure = grids(name, title, f"{measure.meaning}.", panels, scale, axes, lambda x: number(x, 4), words)
    return replace(figure, numbers=_every_measure(runs)) if measure == MEASURES[0] else figure


def _every_measure(runs: Sequence[RunFiles]) -> Table:
    columns: dict[str, Callable[[LayerFidelity], Sequence[float] | None]] = {
        "output mse": lambda layer: layer.output_mse,
        **{measure.title: measure.read for measure in MEASURES[:2]},
        "weight cross entropy": lambda layer: layer.weight_cross_entropy,
        **{measure.title: measure.read for measure in MEASURES[2:]},
    }
    groups = []
    for run in runs:
        rows = []
        for layer in _layers(run):
            values = [read(layer) for read in columns.values()]
            for head in range(len(layer.output_mse)):
                cells = (number(None if value is None else value[head], 4) for value in values)
                rows.append([f"layer {layer.layer}, head {head}", *cells])
        groups.append(Group(rows, run.group))
    return Table("Every measure of every head", ["head", *columns], groups, collapsed=True)


def _shapes(runs: Sequence[RunFiles]) -> Figure | None:
    panels, said = [], []
    columns: dict[str, list[tuple[str, str]]] = {}
    for title, read in _PAIRS.items():
        series = []
        for place, run in enumerate(runs):
            pairs = list(_pairs(run, read))
            if not pairs:
                continue
            series.append((run.name, [t for _, t, _ in pairs], [s for _, _, s in pairs], place))
            mean = [sum(values) / len(pairs) for values in ([t for _, t, _ in pairs], [s for _, _, s in pairs])]
            said.append(f"{run.name}, {title}: teacher {number(mean[0], 2)}, student {number(mean[1], 2)} on average")
            for where, teacher, student in pairs:
                line = columns.setdefault(run.prefix + where, [])
                line.append((title, f"{number(teacher)} / {number(student)}"))
        if series:
            panels.append(Cloud(title, series))
    if not panels:
        return None
    titles = [panel.title for panel in panels]
    rows = [[where, *(dict(line).get(title, "\N{EN DASH}") for title in titles)] for where, line in columns.items()]
    return Figure(
        "How the weights are spread",
        clouds("fidelity-shapes", f"Properties of attention weights, a dot per head. {'; '.join(said)}", panels),
        "A dot per head; on the dashed line the student's head is as the teacher's. Monotonicity: rank correlation of "
        "a query's weights with its q.k. Effective length: how far back the weights lie on average.",
        Table.of("Properties of attention weights, teacher / student", ["head", *titles], rows, collapsed=True),
    )


def _pairs(run: RunFiles, read: Callable[[LayerFidelity], Pair]) -> Iterator[tuple[str, float, float]]:
    for layer in _layers(run):
        pair = read(layer)
        if pair.student is not None:
            for head, (teacher, student) in enumerate(zip(pair.teacher, pair.student, strict=True)):
                yield f"layer {layer.layer}, head {head}", teacher, student


def _histograms(
    runs: Sequence[RunFiles],
    key: str,
    title: str,
    words: str,
    read: Callable[[LayerFidelity], Histogram | None],
) -> list[Block]:
    """Shares of each layer's values that fall in each bin, all heads together."""
    panels = []
    for run in runs:
        rows, bins = {}, list[str]()
        for layer in _layers(run):
            if (found := read(layer)) is not None:
                heads = [counts for counts in found.counts if isinstance(counts, list)]
                sums = [sum(column) for column in zip(*heads, strict=True)]
                sums = sums or [count for count in found.counts if isinstance(count, int)]
                rows[str(layer.layer)] = [value / (sum(sums) or 1) for value in sums]
                bins = [number(edge, 2) for edge in found.edges[:-1]]
        if rows:
            panels.append(Panel(run.group or "", list(rows.values()), list(rows), bins))
    if not panels:
        return []
    scale = Scale.even("share", [x for panel in panels for row in panel.values for x in row], low=0.0)
    return [grids(f"fidelity-{key}", title, words, panels, scale, ("layer", "value, from"), share)]


def maps(runs: Sequence[RunFiles]) -> Section:
    """Attention of chosen heads, teacher beside student, one head at a time."""
    holders = [run for run in runs if run.results.fidelity and run.results.fidelity.maps]
    blocks: list[Block] = []
    for place, run in enumerate(holders):
        title = f"Choose a head of {run.name}" if run.group else "Choose a head"
        section = run.results.fidelity
        assert section is not None
        choices = [_map(chosen, f"map-{place}-{i}", errors(section)) for i, chosen in enumerate(section.maps)]
        blocks.append(Picker(f"maps-{place}", title, choices))
    if holders:
        blocks.append(Text("All weights of these maps stand in evaluation.json, under fidelity.maps.", "note"))
    blocks += not_measured(runs, "maps", lambda run: run in holders)
    windows = ", ".join(
        f"{count(run.window)} tokens" + (f" ({run.name})" if run.group else "")
        for run in holders
        if run.window is not None
    )
    summary = "Rows are queries, columns the keys that they look at."
    summary += f" The student's window: {windows}." if windows else ""
    return Section("maps", "Attention maps", blocks, summary=summary if holders else "")


def _map(found: AttentionMap, key: str, errors: dict[tuple[int, int], Number]) -> Choice:
    name = f"Layer {found.layer}, head {found.head}"
    tokens = [printable(token) for token in found.tokens]
    names = [_cut(token) for token in tokens] if len(tokens) <= 32 else [str(i) for i in range(len(tokens))]
    pair = _seen(found.teacher, found.student)
    scale = Scale.weights("attention weight", [x for grid in pair for row in grid for x in row])
    panels = [
        Panel(who, grid, names, names, square=True) for who, grid in zip(("teacher", "student"), pair, strict=True)
    ]
    apart = [_apart(*rows) for rows in zip(*pair, strict=True)]
    mean = sum(apart) / len(apart)
    words = f"On average {share(mean)} of a query's weight lies elsewhere than the teacher's."
    drawn = heatmaps(
        key, f"{name}, teacher beside student. {words}", panels, scale, row_title="query", column_title="key"
    )
    rows = [
        [f"{i} {tokens[i]}", _top(tokens, pair[0][i]), _top(tokens, pair[1][i]), share(apart[i])]
        for i in range(len(tokens))
    ]
    columns = ["query", "teacher looks most at", "student looks most at", "weight elsewhere"]
    numbers = Table.of(f"{name}, by query", columns, rows, collapsed=True)
    figure = Figure(f"{name}: {_why(found, errors)}", drawn, words, numbers)
    layout = Layout.of(panels)
    corners = [layout.corner(0), layout.corner(1)]
    # What the page says of the cell under the pointer.
    weights = [[[round(x, 4) for x in row] for row in grid] for grid in pair]
    return Choice(name, figure, {"tokens": tokens, "weights": weights, "corners": corners, "cell": layout.cell})


def _why(found: AttentionMap, errors: dict[tuple[int, int], Number]) -> str:
    """Which head it is, in words."""
    error = errors[found.layer, found.head]
    cells = f"; cells of {found.cell_tokens} tokens" if found.cell_tokens > 1 else ""
    return f"{found.rank} of {len(errors)} heads: output off by {share(error, 1)} of the mean square{cells}"


def _seen(*grids: Sequence[Sequence[Number]]) -> list[list[list[Number]]]:
    """Without the cells of the future, where no query looks at any: an encoder's do."""
    causal = not any(x for grid in grids for n, row in enumerate(grid) for x in row[n + 1 :])
    return [[list(row[: n + 1 if causal else None]) for n, row in enumerate(grid)] for grid in grids]


def _cut(token: str) -> str:
    """Short enough to stand at an axis."""
    return token if len(token) <= 12 else f"{token[:11]}\N{HORIZONTAL ELLIPSIS}"


def _apart(teacher: Sequence[Number], student: Sequence[Number]) -> Number:
    """Total variation of two rows of weights."""
    return 0.5 * sum(abs(a - b) for a, b in zip(teacher, student, strict=True))


def _top(tokens: Sequence[str], weights: Sequence[Number]) -> str:
    """The heaviest keys of a query."""
    order = sorted(range(len(weights)), key=lambda key: -weights[key])[:2]
    return ", ".join(f"{key} {tokens[key]} ({number(weights[key], 2)})" for key in order)
