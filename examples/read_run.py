"""Read what a run measured: losses of student and controls, what was retained, and the bytes of one sequence.

    python examples/read_run.py experiments/recommended/pycode-5m

A run folder is plain JSON and YAML, so nothing but Python is needed. The one above is committed: a 5M-parameter model
of Python code, on the sources of CPython's standard library (github.com/python/cpython, Lib), by `recommended`.
"""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", type=Path, help="the folder of a language model's run")
found = json.loads((parser.parse_args().run / "evaluation.json").read_text(encoding="utf-8"))

print(f"{'nats per token':26} {'overall':>8}  {'beyond the window of ' + str(found['window_size'])}")
losses = {}
for line in found["measured"]:
    losses[line["name"]] = line["quality"]["beyond"]["mean"]
    print(f"{line['label']:26} {line['quality']['loss']['mean']:8.3f}  {losses[line['name']]:.3f}")

# Of what the teacher gains beyond the window, compared with models fine-tuned on the same tokens, if the run has them.
window = losses.get("window_finetuned", losses["window"])
teacher = losses.get("teacher_finetuned", losses["teacher"])
print(f"\nkept of the teacher's gain beyond the window: {(window - losses['student']) / (window - teacher):.0%}")
for line in found["comparisons"]:
    paired = line["overall"]  # on the same tokens, so its interval is narrower than those of the two losses
    print(f"student minus {line['other']}: {paired['mean']:+.3f} [{paired['low']:+.3f}, {paired['high']:+.3f}]")

print()
for line in found["speed"]:
    seconds, size = line["decode"]["median"], line["cache_bytes"]
    print(f"{line['model']:8} after {line['prompt_length']:5} tokens: {size:10,} bytes, {1e3 * seconds:.1f} ms a token")
