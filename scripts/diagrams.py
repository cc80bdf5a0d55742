"""Write the diagrams of docs/recipes.md as SVG: readable at the width of a phone, in light and in dark mode.

python scripts/diagrams.py
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
STYLE = """<style>
text { font: 13px sans-serif; fill: #222222; text-anchor: middle; }
text.small { font-size: 11px; }
rect, path { stroke: #222222; stroke-width: 1; fill: none; }
rect.exact { fill: #56b4e9; }
rect.linear { fill: #e69f00; }
rect.sink { fill: #009e73; }
@media (prefers-color-scheme: dark) {
  text { fill: #eeeeee; }
  rect, path { stroke: #eeeeee; }
  rect.exact { fill: #0072b2; }
  rect.linear { fill: #a65e00; }
  rect.sink { fill: #00664d; }
}
</style>"""
WIDTH = 360


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def labelled(x: float, y: float, width: float, words: str, kind: str = "") -> str:
    return box(x, y, width, 28, kind) + text(x + width / 2, y + 19, words)


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Draw an arrow that points down or to the right."""
    head = "l-4 -6 m4 6 l4 -6" if to_x == x else "l-6 -4 m6 4 l-6 4"
    return f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g} {head}"/>'


def window_and_linear() -> tuple[int, str, list[str]]:
    """Return the diagram of a query that reads a window and a state."""
    parts = [text(180, 18, "the tokens so far")]
    kinds = ["sink"] + ["linear"] * 8 + ["exact"] * 5
    parts += [box(12 + 24 * i, 28, 24, 24, kind) for i, kind in enumerate(kinds)]
    parts += [text(24, 68, "sink", "small"), text(132, 68, "older tokens", "small"), text(288, 68, "window", "small")]
    parts += [arrow(132, 74, 132, 104), labelled(42, 106, 180, "state S, of constant size", "linear")]
    parts += [arrow(288, 74, 288, 104), labelled(238, 106, 100, "keys, values", "exact")]
    parts += [text(132, 152, "linear attention", "small"), text(288, 152, "softmax attention", "small")]
    parts += [arrow(132, 158, 132, 184), arrow(288, 158, 288, 184), labelled(42, 186, 296, "combined into one output")]
    alt = "A query reads old tokens through a state of constant size, and the last tokens and the sink exactly"
    return 226, alt, parts


def allocation() -> tuple[int, str, list[str]]:
    """Return the diagram of a budget that is divided over KV heads."""
    parts = [text(180, 18, "one budget of bytes, divided over KV heads")]
    for row, (name, cached) in enumerate([("head 0.0", 24), ("head 0.1", 168), ("head 1.0", 24), ("head 1.1", 88)]):
        y = 32 + 36 * row
        parts += [text(36, y + 19, name, "small"), box(70, y, 14, 28, "sink"), box(84, y, 42, 28, "exact")]
        parts += [box(126, y, cached, 28, "linear")]
    parts += [box(24, 184, 14, 14, "sink"), text(62, 195, "sink", "small")]
    parts += [box(98, 184, 14, 14, "exact"), text(142, 195, "window", "small")]
    parts += [box(186, 184, 14, 14, "linear"), text(272, 195, "cache with eviction", "small")]
    alt = (
        "Each KV head keeps a sink and a window; heads that recall get a large cache with eviction, others a small one"
    )
    return 210, alt, parts


def transfer() -> tuple[int, str, list[str]]:
    """Return the diagram of attention transfer and fine-tuning."""
    parts = [text(180, 18, "1. attention transfer, layer by layer")]
    parts += [labelled(20, 30, 320, "queries, keys, values of the teacher")]
    parts += [arrow(95, 58, 95, 82), arrow(265, 58, 265, 82)]
    parts += [labelled(20, 84, 150, "softmax attention", "exact"), labelled(190, 84, 150, "mixer (trains)", "linear")]
    parts += [arrow(95, 112, 95, 136), arrow(265, 112, 265, 136)]
    parts += [labelled(20, 138, 320, "loss: the difference of the outputs")]
    parts += [text(180, 198, "2. fine-tuning of the whole student")]
    parts += [labelled(20, 210, 150, "text"), arrow(170, 224, 188, 224), labelled(190, 210, 150, "student", "linear")]
    parts += [arrow(265, 238, 265, 262), labelled(20, 264, 320, "loss: the next token, or the teacher's outputs")]
    alt = "Attention transfer trains each mixer to match softmax attention; then the whole student is fine-tuned"
    return 304, alt, parts


DIAGRAMS = {"window_and_linear": window_and_linear, "allocation": allocation, "transfer": transfer}


def svg(name: str) -> str:
    """Return a diagram as an SVG file."""
    height, alt, parts = DIAGRAMS[name]()
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
    return "\n".join([head, f"<title>{alt}</title>", STYLE, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    for name in DIAGRAMS:
        (FOLDER / f"{name}.svg").write_text(svg(name), encoding="utf-8")
