#!/bin/sh
# Build the package, check what a package index shows of it, install it into an empty environment, and carry out
# docs/tutorial.md there, with the bundled model and Python's own sources in place of downloads and few training tokens.
#
#     scripts/release_check.sh FOLDER    # a new folder; or make release-check
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
rm -rf "$1"
mkdir -p "$1"
cd "$1"

"$python" -m venv tools
tools/bin/python -m pip install --quiet --disable-pip-version-check build twine
tools/bin/python -m build --outdir dist "$root"
tools/bin/twine check --strict dist/*
# A package index cannot follow relative links or show files of the repository.
"$python" -m zipfile -e dist/*.whl wheel
if grep -nE '\]\((\.|[A-Za-z/]+\.|docs/|examples/|benchmarks/)|<img|<picture' wheel/*.dist-info/METADATA; then
    echo 'METADATA: expected no relative links, found those above; see hatch-fancy-pypi-readme in pyproject.toml' >&2
    exit 1
fi

"$python" -m venv user
user/bin/python -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" torch
user/bin/python -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "./$(echo dist/*.whl)[gguf]"
PATH=$PWD/user/bin:$PATH
linearize --version
model=$(python -c 'import linearize.demo.corpus as corpus; print(corpus.teacher_path())')
python "$root/scripts/write_stdlib_corpus.py" corpus
few="--set data.max_tokens=1000000 --set data.validation_fraction=0.25"

set -x
linearize plan --model "$model" --set memory.fraction=0.2
linearize convert --model "$model" --dataset corpus/train.jsonl --output-dir OUT --set memory.fraction=0.2 $few
echo "import os" | linearize generate OUT --prompt - --max-new-tokens 20
linearize run --model "$model" --dataset corpus/train.jsonl --output-dir TRAINED $few \
    --set finetune.max_tokens=16384 --set finetune.epochs=1
linearize report TRAINED
# The bundled model has 1,024 positions.
linearize run local-global --model "$model" --dataset corpus/train.jsonl --output-dir HYBRID $few \
    --set data.sequence_length=1024 --set memory.reference_length=1024 --set finetune.max_tokens=16384 --set finetune.epochs=1
linearize export HYBRID EXPORTED --to hf
linearize export HYBRID EXPORTED-GGUF --to gguf
python -c "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained('EXPORTED')"
