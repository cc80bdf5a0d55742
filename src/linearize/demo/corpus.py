"""The bundled teacher's folder, and texts for it: the sources of the running Python's own standard library.

Nothing is downloaded, and the teacher was trained on such text: the standard library of Python 3.11.
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

# Not library code: installed packages, tests, and generated files (build settings, manual pages).
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "lib-dynload", "pydoc_data", "site-packages", "test", "tests"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


def teacher_path() -> Path:
    """Return the folder of the bundled teacher, for ``from_pretrained``: see the README.md in it."""
    return Path(str(importlib.resources.files("linearize.demo") / "teacher"))


def standard_library_texts() -> tuple[list[str], list[str]]:
    """Return the sources of the standard library, one text per file, in order of paths: (training, held out).

    The modules of `HELD_OUT_MODULES` that this Python has are held out. No text is in both lists.

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
    """Return the folder of the running Python's standard library, also in a virtual environment."""
    return Path(sysconfig.get_path("stdlib"))


def module_sources(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (dotted module name, source) of the .py files below `folder`, in order of paths.

    Packages are named without `.__init__`. Names start at the first folder that is not a package, so they are equal for
    ``site-packages`` and for a package in it. Tests, generated and blank files, and files that are not UTF-8 are left
    out.
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
        # Pruned while walking: installed packages can be a hundred times the size of the library.
        folders[:] = [name for name in folders if not _is_skipped(name)]
        for name in files:
            path = Path(parent, name)
            if path.suffix == ".py" and not _is_skipped(name) and path.is_file():
                yield path


def _is_skipped(name: str) -> bool:
    return name in _SKIPPED_FOLDERS or name.startswith(_SKIPPED_PREFIXES)
