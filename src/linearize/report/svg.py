"""Convert Matplotlib drawings to SVG for a page, with real text, the page's colours, and unique ids.

Matplotlib draws in placeholder colours, one per name; the page's style sheet defines them, so one drawing serves the
light and the dark theme. Equal drawings have equal bytes on every machine.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from io import StringIO
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from linearize.base import without_controls
from linearize.report.numbers import Number

LEVELS = 12  # colours of a heat map, from --h0 to --h11
SERIES = 6  # colours that tell lines apart, from --s0 to --s5
COLOURS = (
    ["ink", "muted", "rule", "paper", "empty", "low-text", "mid-text", "high-text"]
    + [f"s{i}" for i in range(SERIES)]
    + [f"h{i}" for i in range(LEVELS)]
)
MARKERS = "osD^vP"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3)))
_PLACEHOLDERS = {name: f"#f0{index:04x}" for index, name in enumerate(COLOURS)}
_NAMES = {placeholder: name for name, placeholder in _PLACEHOLDERS.items()}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"


def colour(name: str) -> str:
    """Return matplotlib's argument for the page's colour `name`."""
    return _PLACEHOLDERS[name]


_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the layout of text is equal on every machine
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 12,
    "axes.edgecolor": colour("rule"),
    "axes.facecolor": "none",
    "axes.labelcolor": colour("muted"),
    "axes.titlecolor": colour("ink"),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": colour("rule"),
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "legend.labelcolor": colour("ink"),
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "patch.linewidth": 0,
    "text.color": colour("ink"),
    "text.parse_math": False,  # a token may be a dollar sign
    "xtick.color": colour("rule"),
    "ytick.color": colour("rule"),
    "xtick.labelcolor": colour("muted"),
    "ytick.labelcolor": colour("muted"),
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
}


def draw(key: str, label: str, width: Number, height: Number, paint: Callable[[Figure], None]) -> Markup:
    """Return a drawing of `width` x `height` CSS pixels, made by `paint`.

    Args:
        key: unique among the drawings of the page.
        label: description for screen readers.
    """
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Browsers use another font for scripts that this font lacks; only the width is estimated here.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcParams["svg.hashsalt"] = key
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        paint(figure)
        written = StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return _embed(written.getvalue(), key, label, width, height)


def _embed(text: str, key: str, label: str, width: Number, height: Number) -> Markup:
    root = ElementTree.fromstring(without_controls(text))  # XML allows no control characters
    for parent in list(root.iter()):
        for child in list(parent):
            # A style sheet inside would apply to the whole page.
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(child)
    used = set(re.findall(r'(?:url\(|xlink:href=")#([\w.-]+)', text))
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        _rewrite(element, key, used)
    root.attrib = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": without_controls(label)}
    root.set("style", f"width: {width:g}px")
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _rewrite(element: ElementTree.Element, key: str, used: set[str]) -> None:
    """Make ids unique, round coordinates to two decimals, and use the page's colours and fonts, in place."""
    found = element.attrib.pop("id", None)
    if found in used:
        element.set("id", f"{key}-{found}")
    if (link := element.attrib.pop(_LINK, None)) is not None:
        element.set("href", f"#{key}-{link[1:]}")
    for name, value in element.attrib.items():
        if name == "style":
            value = re.sub(r"font-family: [^;]*(; )?|stroke-linejoin: round(; )?", "", value).strip("; ")
            value = re.sub(r"#f0[0-9a-f]{4}", lambda match: f"var(--{_NAMES[match[0]]})", value)
        elif name == "clip-path":
            value = value.replace("url(#", f"url(#{key}-")
        elif name not in ("id", "href"):
            value = re.sub(
                r"-?\d+\.\d+(e-?\d+)?", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value
            )
            value = " ".join(value.split())
        element.set(name, value)
