#!/bin/sh
# Measure prompts, steps and training on one GPU, after a check of correctness. At most eight minutes.
#
#     sh benchmarks/gpu.sh [FOLDER]        # JSON files and logs go to FOLDER (default: gpu-results)
#
# PYTHON names an interpreter with torch for CUDA, triton and the extra `dev` of pyproject.toml. Weights are random; the
# memory of each KV head is SmolLM2-135M-Instruct's. A part that fails or takes too long does not stop the others, but
# the exit status is 1 then. models.py writes its JSON after each length, the others at their end.
set -u
out=${1:-gpu-results}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0

last=$(git log -1 --format=%h -- 'benchmarks/results/*h100*' 2>/dev/null)
since=$([ -n "$last" ] && git log --oneline "$last.." -- src/linearize/ops src/linearize/mixers src/linearize/hf | wc -l)
echo "new since the last table on a GPU: ${since:-an unknown number of} commits to operations, mixers and models${last:+, since $last}"

part() { # seconds, name, command: its output goes to a log, the end of it here
    seconds=$1 name=$2
    shift 2
    timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1
    code=$?
    [ "$code" = 0 ] || status=1
    echo "$name: exit $code"
    tail -n 8 "$out/$name.log"
}

on_gpu() { # seconds, name, script, model, further arguments
    seconds=$1 name=$2 script=$3 model=$4
    shift 4
    part "$seconds" "$name" "$python" "benchmarks/$script.py" --model "$model" --dtype bfloat16 --device cuda \
        --threads 8 --json "$out/$name.json" "$@"
}

lengths="512 2048 8192 32768"
part 120 correctness "$python" -m pytest -q -x -n 4 -p no:cacheprovider \
    tests/test_gpu.py tests/ops/test_triton_kernels.py tests/ops/test_triton_gradients.py \
    "tests/hf/test_compiled.py::test_machine_code_writes_what_eager_steps_write[cuda]"
on_gpu 80 models-llama-1b-prefill models llama-1b --pass prefill --repeats 3 --lengths $lengths \
    --recipes lolcats recommended recommended:full
on_gpu 40 models-llama-1b-decode models llama-1b --pass decode --repeats 5 --lengths $lengths \
    --recipes lolcats recommended
on_gpu 70 models-llama-8b-prefill models llama-8b --pass prefill --repeats 2 --lengths $lengths \
    --recipes lolcats recommended recommended:full
on_gpu 130 generate-llama-1b generate llama-1b --recipes lolcats --lengths 2048 --new-tokens 32 --repeats 3
on_gpu 40 training-llama-1b training llama-1b --recipes lolcats --length 2048 --batch 2 --repeats 3
exit $status
