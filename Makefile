# The commands that developers and CI run. Each makes its environment first; PYTHON picks the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEPLOY_TOOLS ?= $(HOME)/.cache/m3-deploy-tools
# Tests with real processes and clocks may be disturbed by a busy machine: what fails runs up to twice more, and the summary says so.
MORE_TRIES := --reruns 2

# Images often set it, and then each of the hundreds of processes that tests start would compile what it imports of ours.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve check test test-gpu test-gpu-shared test-gpu-alone test-deploy format clean

serve: $(STAMP)
	$(BIN)/m3-server serve --model server/model/tiny

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# More workers than cores, as many tests wait for other processes. Tests that look at response times come last and alone.
TEST_WORKERS ?= $(shell expr 3 '*' $$(getconf _NPROCESSORS_ONLN) / 2)
test: $(STAMP)
	$(BIN)/pytest -n $(TEST_WORKERS) --dist worksteal -m "not gpu and not deploy and not e2e" $(PYTEST_ARGS)
	$(BIN)/pytest -n $(TEST_WORKERS) --dist loadgroup -m "e2e and not deploy and not alone" $(MORE_TRIES) $(PYTEST_ARGS)
	$(BIN)/pytest -m "alone and not deploy" $(MORE_TRIES) $(PYTEST_ARGS)

# What needs a Hopper GPU, in the environment as it is. Two ranks need two; what measures a GPU's memory needs one to itself, so it comes
# late, and workers leave it the first of several: then `make -j2 test-gpu` runs both parts at once.
PYTEST ?= $(BIN)/pytest
GPU_WORKERS ?= 12
test-gpu: test-gpu-shared test-gpu-alone

test-gpu-shared:
	ONE_GPU_PER_WORKER=1 $(PYTEST) -v -n $(GPU_WORKERS) --dist worksteal -m gpu \
		tests/kernels tests/model tests/engine/test_engine_start_gpu.py $(PYTEST_ARGS)

test-gpu-alone:
	$(PYTEST) -v -m gpu tests/engine/test_engine_memory_gpu.py $(PYTEST_ARGS)
	$(PYTEST) -v -n 5 -m gpu tests/engine/test_ranks_gpu.py tests/model/test_mailboxes_gpu.py $(PYTEST_ARGS)

# The chart, the image, the alerts: with real Helm, Prometheus, nginx and podman. Needs root on Debian.
test-deploy: $(STAMP)
	.ci/install-deploy-tools $(DEPLOY_TOOLS)
	DEPLOY_TOOLS=$(abspath $(DEPLOY_TOOLS)) $(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile \
		-m deploy tests/deploy $(MORE_TRIES) $(PYTEST_ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch comes first and from its pinned version, so that no other package pulls a different build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
