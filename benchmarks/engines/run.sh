#!/usr/bin/env bash
# Run a model that `linearize run local-global` made in stock engines, and see that greedy tokens are equal.
#
#     benchmarks/engines/run.sh RUN TEACHER TEXT OUT
#
# RUN is the run's folder, TEACHER the unconverted model, TEXT a text file, OUT a new folder for what is written.
# Needs .venv (make setup), .venv-vllm (make test-vllm makes it), and Node.js with npm.
set -euo pipefail
run=$1 teacher=$2 text=$3 out=$4
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
count=${COUNT:-20} tokens=${TOKENS:-600} length=${LENGTH:-4096}
export OMP_NUM_THREADS=1
mkdir -p "$out"
python="$root/.venv/bin/python"
"$root/.venv/bin/linearize" export "$run" "$out/hf" --to hf --type f32
"$root/.venv/bin/linearize" export "$run" "$out/gguf" --to gguf --type f32
"$python" "$here/prompts.py" --model "$out/hf" --text "$text" --count "$count" --tokens "$tokens" --output "$out/prompts.json"
mkdir -p "$out/node" "$out/teacher"
"$python" "$here/unconverted_gguf.py" --model "$teacher" --type f32 --output "$out/teacher/model.gguf"
(cd "$out/node" && npm install --silent --no-audit --no-fund --ignore-scripts node-llama-cpp@3.22.1)
"$python" "$here/with_transformers.py" --model "$out/hf" --prompts "$out/prompts.json" --output "$out/transformers.json"
"$python" "$here/with_transformers.py" --model "$teacher" --prompts "$out/prompts.json" --output "$out/teacher/transformers.json"
llama="$here/with_llama_cpp.mjs"
(cd "$out/node" && node "$llama" "$out/gguf/model-f32.gguf" "$out/prompts.json" "$out/llama-cpp.json" 64 "$length")
(cd "$out/node" && node "$llama" "$out/teacher/model.gguf" "$out/prompts.json" "$out/teacher/llama-cpp.json" 64 "$length")
vllm="$root/.venv-vllm/bin/python"
"$vllm" "$here/with_vllm.py" --model "$out/hf" --prompts "$out/prompts.json" --max-model-len "$length" --output "$out/vllm.json"
"$vllm" "$here/with_vllm.py" --model "$teacher" --prompts "$out/prompts.json" --max-model-len "$length" --output "$out/teacher/vllm.json"
"$python" "$here/compare.py" "$out/transformers.json" "$out/vllm.json" "$out/llama-cpp.json" \
    --teacher "transformers=$out/teacher/transformers.json" "vllm=$out/teacher/vllm.json" \
    "llama-cpp=$out/teacher/llama-cpp.json"
