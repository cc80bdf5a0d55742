"""What other programs on the same cores cost a run, by how torch's threads wait for each other (libgomp's setting).

    python benchmarks/neighbours.py --model src/linearize/demo/teacher --recipe lolcats

Every round trains by attention transfer on random tokens, once with each setting and each number of busy neighbours (a
Python loop each), in a fresh process, since libgomp reads its setting when it is loaded. The caller's own settings,
OMP_NUM_THREADS among them, do not count. Milliseconds a step: medians over rounds, with the least and the greatest.
With N neighbours and T threads on C cores, a run's fair share of the time is max(1, (N + T) / C) times that alone.
`--model` can be any softmax model; the one above is bundled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SETTINGS = {
    "libgomp's default": {},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=3000": {"GOMP_SPINCOUNT": "3000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def seconds_a_step(model: str, recipe: str, steps: int) -> float:
    """Of attention transfer, 8 rows of 256 random tokens a step, without what comes before and after the steps."""
    import torch

    import linearize
    from linearize.data.rows import PackedRows
    from linearize.hf.checkpoint import load_model

    torch.set_flush_denormal(True)
    teacher = load_model(model, dtype=torch.float32, device=torch.device("cpu"))
    student = linearize.convert(teacher, linearize.Recipe.load(recipe))
    config = linearize.Recipe.load(recipe, {"transfer.epochs": 1, "transfer.batch_size": 8}).transfer
    assert config is not None
    tokens = torch.randint(teacher.config.vocab_size, (8 * steps, 256), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(256).expand_as(tokens).contiguous()
    rows = PackedRows(tokens, positions, tokens.masked_fill(positions == 0, -100))
    with tempfile.TemporaryDirectory() as folder:
        few = rows.rows(torch.arange(1))
        return linearize.attention_transfer(student, rows, few, config, output_dir=Path(folder)).seconds / steps


@contextmanager
def busy(neighbours: int) -> Iterator[None]:
    """As many processes that compute without end."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a softmax model: a folder or hub id")
    parser.add_argument("--recipe", default="lolcats", help="by which to convert it (default: %(default)s)")
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 5], help="busy loops (default: 0 5)")
    parser.add_argument("--steps", type=int, default=8, help="of training, each time (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="keep the numbers in this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.stdout.write(str(seconds_a_step(arguments.model, arguments.recipe, arguments.steps)))
        return

    from records import write_results
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    for name in [name for name in os.environ if name.startswith(("GOMP_", "OMP_"))]:
        del os.environ[name]
    load = os.getloadavg()
    cases = [(setting, count) for count in arguments.neighbours for setting in SETTINGS]
    found: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    console = Console(stderr=True)
    for setting, count in track(cases * arguments.repeats, description="training", console=console):
        with busy(count):
            child = subprocess.run(command, env=os.environ | SETTINGS[setting], stdout=subprocess.PIPE, check=True)
        found[setting, count].append(float(child.stdout))
    table = Table("setting", *(f"{count} neighbours" for count in arguments.neighbours), title="ms a step")
    for setting in SETTINGS:
        times = [[1e3 * x for x in found[setting, count]] for count in arguments.neighbours]
        table.add_row(setting, *(f"{statistics.median(x):,.0f} ({min(x):,.0f}-{max(x):,.0f})" for x in times))
    Console().print(table)
    seconds = [{"setting": setting, "neighbours": count, "seconds": x} for (setting, count), x in found.items()]
    write_results(arguments, load, results=seconds, cores=os.cpu_count())


if __name__ == "__main__":
    main()
