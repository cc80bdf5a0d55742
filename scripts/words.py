"""Find retired words in the project's prose and code, and fail with the place and the words to use instead.

python scripts/words.py            # all files that users and contributors read
python scripts/words.py FILE ...   # these files

`docs/results` is left out: `experiments/results.py` writes it from committed results, with the names they had.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ = (
    "*.md",
    "docs/**/*.md",
    "benchmarks/**/*.md",
    "experiments/*/README.md",
    "Makefile",
    "mkdocs.yml",
    "pyproject.toml",
)
CODE = ("py", "yaml", "jinja", "html", "js")
FOLDERS = ("src", "tests", "scripts", "benchmarks", "experiments")
# Patterns of retired words, where a space stands for any white space and comment marks, and the words to use.
RETIRED = {
    r"memory by need": "per-head KV budget allocation",
    r"budgets? that (all )?heads share": "per-head KV budget allocation",
    r"exact caches?": "KV cache with eviction",
    r"far gains?": "long-context gain retained",
    r"(train|fine-?tun)ed alike": "fine-tuned on the same tokens",
    r"train almost alike": "with slightly different results",
    r"as (it|they) (comes?|came)": "before fine-tuning, untrained, or when it is generated",
    r"foretell(s|ing)?|foretold": "predict",
    r"left to themselves": "greedy outputs",
    r"learn(s|ed)? to give": "is trained to match",
    r"numbers (next|near) to 0": "denormal numbers",
    r"go(es)? its own way": "differs from",
    r"nobody works in": "no active run",
    r"in (the|an) absolute scale": "log-sum-exp merge",
    r"of_cache_at": "reference_length",
    r"wants_more": "needs_fallback",
    r"--page": "--ui",
    r"evaluation[./]worth": "evaluation.results",
}
EXCEPTIONS = {
    ("CHANGELOG.md", r"--page"): "the entry on its new name",
    ("CHANGELOG.md", r"of_cache_at"): "the entry on its new name",
    ("tests/mixers/test_real_keys.py", r"in (the|an) absolute scale"): "the recipe's name",
}


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield each retired form with its compiled pattern, which also matches across the end of a line."""
    for form in RETIRED:
        spaced = form.replace(" ", r"(?:\s|#|\*)+")
        yield form, re.compile(rf"(?<![\w-])(?:{spaced})(?!\w)", re.IGNORECASE)


def retired_words(path: Path, name: str) -> Iterator[str]:
    """Yield one line for each retired word of a file: file, line, the word, and the words to use.

    Args:
        name: the path that is printed, relative to the project.
    """
    text = path.read_text(encoding="utf-8")
    for form, pattern in patterns():
        if (name, form) in EXCEPTIONS:
            continue
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: {' '.join(match[0].split())!r}: say {RETIRED[form]!r}"


def files() -> Iterator[Path]:
    """Yield the files that are checked, this one apart."""
    globs = [*READ, *(f"{folder}/**/*.{suffix}" for folder in FOLDERS for suffix in CODE)]
    for path in sorted({path for glob in globs for path in ROOT.glob(glob)}):
        generated = path.is_relative_to(ROOT / "docs" / "results") or path == ROOT / "docs" / "results.md"
        if path != Path(__file__) and not generated:
            yield path


def main(arguments: Iterable[str]) -> int:
    """Print the retired words of the named files, or of all; return 1 if there are any."""
    named = [Path(argument).resolve() for argument in arguments]
    found = []
    for path in named or files():
        found += retired_words(path, str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path))
    for line in found:
        print(line)  # noqa: T201
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
