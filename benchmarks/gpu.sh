#!/bin/sh
# What a GPU has to say: correctness, then the tables of README.md, "On a GPU". Some nine minutes of one H100.
#
#     sh benchmarks/gpu.sh [FOLDER]        # JSON files and logs go to FOLDER (default: gpu-results)
#
# PYTHON names an interpreter with torch for CUDA, triton and what pyproject.toml asks for. Weights are random; the
# memory of each KV head is SmolLM2-135M-Instruct's. A part that fails or takes too long does not stop the others.
set -u
export PYTHONUNBUFFERED=1
cd "$(dirname "$0")/.." || exit 2
out=${1:-gpu-results}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"

last=$(git log -1 --format=%h -- 'benchmarks/results/*h100*' 2>/dev/null)
since=$([ -n "$last" ] && git log --oneline "$last.." -- src/linearize/ops src/linearize/mixers src/linearize/hf | wc -l)
echo "new since the last table on a GPU: ${since:-an unknown number of} commits to operations, mixers and models${last:+, since $last}"

part() { # seconds, name, command: its output goes to a log, the end of it here
    seconds=$1 name=$2
    shift 2
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1
    echo "$name: exit $?"
    tail -n 8 "$out/$name.log"
}

models() { # seconds, name, model, further arguments of models.py
    seconds=$1 name=$2 model=$3
    shift 3
    part "$seconds" "$name" "$python" benchmarks/models.py --model "$model" --dtype bfloat16 --device cuda --threads 8 \
        --json "$out/$name.json" "$@"
}

part 90 correctness "$python" -m pytest -q -p no:cacheprovider -m "gpu or not gpu" tests/test_gpu.py \
    tests/ops/test_triton_kernels.py
lengths="512 2048 8192 32768"
models 80 models-llama-1b-prefill llama-1b --pass prefill --repeats 3 --lengths $lengths \
    --recipes lolcats recommended recommended:full
models 40 models-llama-1b-decode llama-1b --pass decode --repeats 5 --lengths $lengths --recipes lolcats recommended
models 80 models-llama-8b-prefill llama-8b --pass prefill --repeats 2 --lengths $lengths \
    --recipes lolcats recommended recommended:full
part 150 compiled-llama-1b "$python" benchmarks/compiled.py --model llama-1b --dtype bfloat16 --device cuda --threads 8 \
    --recipes lolcats --lengths 2048 --new-tokens 32 --repeats 3 --json "$out/compiled-llama-1b.json"
part 60 training-llama-1b "$python" benchmarks/training.py --model llama-1b --dtype bfloat16 --device cuda --threads 8 \
    --recipes lolcats --length 2048 --batch 2 --repeats 3 --json "$out/training-llama-1b.json"
part 40 profile-llama-1b-prefill "$python" benchmarks/profiles.py --model llama-1b --dtype bfloat16 --device cuda \
    --threads 8 --recipes recommended --pass prefill --length 8192 --json "$out/profile-llama-1b-prefill.json"
