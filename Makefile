# `make demo` starts the demo, `make test` runs all checks. Both make .venv and download what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Port of `make demo`.
PORT   ?= 8080
# Test processes: one more than there are cores, because many tests wait. With two more, the suite is a tenth faster, but
# each of three runs had a test that a time-out or a race failed. Each needs about 1.5 GB.
TESTERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# A test process that dies ends the run: restarted ones make pytest-xdist wait without end.
PYTEST := $(BIN)/python -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
export OMP_WAIT_POLICY = PASSIVE
# Keep bytecode: without it every process compiles the tests (12 s of CPU) and the product (1 s) again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-all unit quick lint types bench gpu clean

demo: $(STAMP)
	$(BIN)/loraplex up --demo --port $(PORT) --data-dir .loraplex

test: lint
	$(MAKE) -j 2 types unit

unit: $(STAMP)
	$(PYTEST)

# Also the slow tests, and every case of the kernels' parameter grids in Triton's interpreter.
test-all: lint types $(STAMP)
	$(PYTEST) -m "slow or not slow"

# Without real servers and without tests that keep a core busy for seconds.
quick: $(STAMP)
	$(PYTEST) -m "not integration and not heavy"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# At low priority: the tests beside it leave cores idle, except in their first half minute.
types: $(STAMP)
	nice -n 19 $(BIN)/mypy

# Measures the stack that `make demo` runs in another terminal.
bench: $(STAMP)
	$(BIN)/loraplex bench --tenants .loraplex/demo.json --n 64 --c 16

# Tests and measures kernels and engine on this machine's GPU in about 16 minutes, with the torch and triton of PYTHON;
# `make gpu FLAGS='--part 1'` and `--part 2` take at most 9 minutes each.
# `make gpu FLAGS=--dry-run` shows without a GPU that all of it runs; it uses .venv, because PYTHON may lack torch.
DRY := $(findstring --dry-run,$(FLAGS))
gpu: $(if $(DRY),$(STAMP))
	$(if $(DRY),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(FLAGS)

# torch comes first and alone, so that no other package's requirement picks a build with CUDA.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into .venv (about 2.4 GB, a few minutes) ..."
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .loraplex .loraplex-test
