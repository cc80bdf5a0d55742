"""Find the longest chain of imports between the modules of the package, and fail if it is longer than a limit.

Imports inside functions and under TYPE_CHECKING do not count: they do not happen when a module is imported.

    python scripts/import_chain.py 16
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def imports(statements: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements import when they run, as ``module`` or ``module.name``."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.If):
            checking = "TYPE_CHECKING" in ast.unparse(statement.test)
            yield from imports(statement.orelse if checking else statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handled = [inner for handler in statement.handlers for inner in handler.body]
            yield from imports(statement.body + handled + statement.orelse + statement.finalbody)


def import_graph(source: Path) -> dict[str, set[str]]:
    """Return for each module of the package in `source` the modules of the package that it imports."""
    paths = {}
    for path in sorted((source / "linearize").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for module, path in paths.items():
        names = imports(ast.parse(path.read_text(encoding="utf-8")).body)
        # A name is a module, or something in the module before its last dot.
        imported = {name if name in paths else name.rpartition(".")[0] for name in names}
        graph[module] = imported & paths.keys() - {module}
    return graph


def longest_chain(graph: dict[str, set[str]]) -> tuple[str, ...]:
    """Return the longest chain, each module of which imports the next.

    Raises:
        RecursionError: modules import each other in a circle.
    """

    @cache
    def chain(module: str) -> tuple[str, ...]:
        return (module, *max(map(chain, sorted(graph[module])), key=len, default=()))

    return max(map(chain, graph), key=len)


def main() -> None:
    limit, chain = int(sys.argv[1]), longest_chain(import_graph(SOURCE))
    if len(chain) > limit:
        sys.exit(f"expected import chains of at most {limit} modules, found {len(chain)}:\n" + "\n".join(chain))


if __name__ == "__main__":
    main()
