"""The bundled teacher's folder, and texts for it: the sources of the running Python's own standard library.

Nothing is downloaded, and the teacher is at home in these texts: it was trained on the standard library of Python 3.11.
"""

from __future__ import annotations

import importlib.resources
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from linearize.base import UserError

HELD_OUT_MODULES = frozenset(
    {
        "asyncio.selector_events",
        "curses.ascii",
        "email.parser",
        "encodings.cp1258",
        "encodings.cp932",
        "encodings.iso8859_1",
        "encodings.iso8859_14",
        "encodings.johab",
        "http.client",
        "importlib.resources._common",
        "json.encoder",
        "multiprocessing",
        "opcode",
        "optparse",
        "pydoc",
        "string",
        "subprocess",
        "sunau",
        "telnetlib",
        "turtledemo.fractalcurves",
        "unittest.signals",
        "wsgiref.simple_server",
        "xml.dom",
        "xml.sax.xmlreader",
        "zipimport",
    }
)
"""Modules of the standard library that the bundled teacher never saw; no Python version has all of them."""

# Not library code: what was installed into it, its tests, and what was generated (build settings, manual pages).
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "lib-dynload", "pydoc_data", "site-packages", "test", "tests"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


def teacher_path() -> Path:
    """The folder of the bundled teacher, for ``from_pretrained``: see the README.md in it."""
    return Path(str(importlib.resources.files("linearize.demo") / "teacher"))


def standard_library_texts() -> tuple[list[str], list[str]]:
    """The sources of the standard library, one text per file, by path: (to train on, held out).

    Held out are those of `HELD_OUT_MODULES` that this Python has. No text is on both sides.

    Raises:
        UserError: this Python comes without sources, or without any of the held-out modules.
    """
    folder = standard_library_folder()
    sources = dict(module_sources(folder))
    held_out = [text for module, text in sources.items() if module in HELD_OUT_MODULES]
    if not held_out:
        raise UserError(
            f"the standard library: expected Python sources in {folder}, found {len(sources)} files and none of "
            f"{', '.join(sorted(HELD_OUT_MODULES)[:3])}, ...; use a Python that was installed with its .py files"
        )
    unseen = set(held_out)
    train = [text for text in sources.values() if text not in unseen]
    return train, held_out


def standard_library_folder() -> Path:
    """Where the running Python keeps the modules of its standard library; the same in a virtual environment."""
    return Path(sysconfig.get_path("stdlib"))


def module_sources(folder: Path) -> Iterator[tuple[str, str]]:
    """(dotted module name, source) of the .py files below `folder`, by path; a package is named without `.__init__`.

    Names start at the first folder that is not a package, so they are the same for ``site-packages`` and for a package
    in it. Tests, generated and blank files are left out, and those that are not UTF-8.
    """
    folder = folder.resolve()
    root = folder
    while (root / "__init__.py").is_file():
        root = root.parent
    for path in sorted(_python_files(folder), key=lambda path: path.as_posix()):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            continue
        if text.strip():
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), text


def _python_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        # Pruned while walking: the installed packages can be a hundred times the library.
        folders[:] = [name for name in folders if not _is_skipped(name)]
        for name in files:
            path = Path(parent, name)
            if path.suffix == ".py" and not _is_skipped(name) and path.is_file():
                yield path


def _is_skipped(name: str) -> bool:
    return name in _SKIPPED_FOLDERS or name.startswith(_SKIPPED_PREFIXES)
