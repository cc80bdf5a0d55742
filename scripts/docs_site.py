"""Hooks of mkdocs (mkdocs.yml): add to the site the files outside docs/ that pages link to, and link them there.

The pages are read on GitHub, too, so they link to `../benchmarks/README.md` as files of the repository. On the site
such a file is a page or a file under `repository/`. Links to folders become text, since a site has no folders to show.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOLDER = "repository"
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add every file outside docs/ that a page of the site links to, directly or through another one."""
    pages = [DOCS / file.src_uri for file in files if file.is_documentation_page()]
    added: set[Path] = set()
    while pages:
        for target in _linked(pages.pop()):
            if target.is_file() and not target.is_relative_to(DOCS) and target not in added:
                added.add(target)
                pages += [target] if target.suffix == ".md" else []
    for path in sorted(added):
        name = f"{FOLDER}/{path.relative_to(ROOT)}"
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links between docs/ and the rest of the repository to where the files are on the site."""
    source = Path(str(page.file.abs_src_path))
    here = Path(page.file.src_uri).parent

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]
        if target.is_dir():
            return match[1].removeprefix("[").removesuffix("]")
        place = target.relative_to(DOCS) if target.is_relative_to(DOCS) else FOLDER / target.relative_to(ROOT)
        return f"{match[1]}({os.path.relpath(place, here)}{match[3] or ''})"

    return LINK.sub(moved, markdown)


def _linked(page: Path) -> list[Path]:
    """Return the files that a page links to by relative links."""
    return [(page.parent / match[2]).resolve() for match in LINK.finditer(page.read_text(encoding="utf-8"))]
