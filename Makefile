# Everything runs in .venv, which make fills itself. What is cached lies in .cache.
#
#   PYTHON=python3.12     the interpreter that .venv is made with
#   PIP_ARGS=...          goes to every pip install, to say where a CPU-only build of torch is found
#   ARGS=...              goes to pytest or the demo: make test ARGS="tests/core -x"
#   BENCHMARKS=...        other measurements: make bench BENCHMARKS=examples/benchmarks/background.py
#   SEED=812              what test-long draws at random; by default the time, printed
#   JOBS=0                one process runs all tests, one after the other, and shows them as they end

PYTHON   ?= python3
PIP_ARGS ?=
ARGS     ?=
JOBS     ?= 2
SEED     ?= $(shell date +%s)

VENV    := .venv
PY      := $(VENV)/bin/python
PYTEST  := $(PY) -m pytest
# One process runs all tests of a file, which share what is dear to make.
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
SOURCES := $(wildcard lightning_elastic_zero tests examples)
BENCHMARKS ?= examples/benchmarks/save_load.py

INSTALLED := $(VENV)/.installed
# DeepSpeed compiles its operator for offload to NVMe against libaio.
OPS_BUILT := .cache/ops-built$(if $(wildcard /usr/include/libaio.h),-with-libaio)

# DeepSpeed finds ninja on PATH, and it must always be the same ninja: another one builds all anew.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Ranks share the processor; with more threads each, they wait for one another.
export OMP_NUM_THREADS := 1

# DeepSpeed decides on its device when it is imported, and would take CUDA wherever there is some, in
# a test of CPU ranks too. So it is told, and what it compiles for one is not compiled over the other's.
demo docs test test-long test-releases soak bench ops: export DS_ACCELERATOR := cpu
demo test test-long test-releases soak bench ops: export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions/cpu
test-gpu: export DS_ACCELERATOR := cuda
test-gpu: export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions/cuda

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo docs test test-long test-releases test-gpu soak lint format wheel bench ops clean distclean

help: ## Show what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ops ## Train on 4 processes, resume on 2, then on 3, beside a run that never stopped
	$(PY) examples/demo.py $(ARGS)

test: ops ## Run the tests that take seconds each, the same ones everywhere
	$(PYTEST) -m "not (long or gpu or releases)" $(SIDE_BY_SIDE) $(ARGS)

test-long: ops ## Run all tests: full matrices, faults, random search
	$(PYTEST) -m "not (gpu or releases)" --hypothesis-seed=$(SEED) $(SIDE_BY_SIDE) $(ARGS)

test-releases: $(INSTALLED) ## Run the core tests in environments with other releases, each made first
	$(PYTEST) -m releases $(ARGS)

test-gpu: ops ## Run the tests of devices on this machine's cards; on none: ARGS=--device=cpu
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	@find $(TORCH_EXTENSIONS_DIR) -name lock -delete
	$(PYTEST) -m "gpu or device" $(ARGS)

soak: ops ## Kill and restart a run in random ways for an hour: make soak ARGS="--minutes 10"
	$(PY) -m tests.elastic.soak $(ARGS)

lint: $(INSTALLED) ## Check style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy $(SOURCES)

format: $(INSTALLED) ## Format the code, and mend what ruff can mend
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

# Anew each time (-E): what is only read again when it has changed would not warn a second time.
docs: $(INSTALLED) ## Build the pages and the API as a site, .cache/site/docs/index.html; a warning fails
	$(PY) -m sphinx -q -E -W --keep-going -d .cache/doctrees -c docs . .cache/site

wheel: $(INSTALLED) ## Build dist/*.whl, and check what an index would show of it
	rm -rf dist
	$(PY) -m build --wheel --no-isolation --outdir dist
	$(PY) -m twine check --strict dist/*.whl

bench: ops ## Measure saving and loading beside other software and the machine's limits
	@set -e; for script in $(BENCHMARKS); do echo "$$script"; $(PY) $$script $(ARGS); done

clean: ## Remove caches and what runs have left
	rm -rf .cache .hypothesis build dist lightning_logs runs demo_output
	find lightning_elastic_zero tests examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## Remove .venv too
	rm -rf $(VENV)

# torch comes first and by its pinned version, so that nothing later chooses a build of its own.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@

# A process that is killed while it loads an op leaves a lock that all later ones wait for, silently
# and without end. No other run is under way in this checkout, or it would lose its lock here.
ops: $(OPS_BUILT)
	@find $(TORCH_EXTENSIONS_DIR) -name lock -delete

# One process compiles what CPU ranks load, so that they do not all wait for it within a test's
# timeout. Without a working compiler there is nothing to build, which is no failure, and is tried
# again the next time.
$(OPS_BUILT): $(INSTALLED)
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	@find $(TORCH_EXTENSIONS_DIR) -name lock -delete
	@echo "Building DeepSpeed's CPU ops, once: about a minute."
	@if timeout --foreground 900 $(PY) -c "$$BUILD_OPS" 2> .cache/ops-build.log; then touch $@; \
	else echo "Not built (.cache/ops-build.log): each run will try again."; fi

define BUILD_OPS
import sys
from deepspeed.accelerator import get_accelerator

failed = []
for name in ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder"):
    builder = get_accelerator().create_op_builder(name)
    if name == "AsyncIOBuilder" and not builder.is_compatible():
        print(f"  {name}: not built: libaio-dev is not installed")
        continue
    try:
        builder.load()
    except (ImportError, OSError, RuntimeError) as error:
        failed.append(name)
        reasons = [line for line in str(error).splitlines() if "rror:" in line or "not found" in line]
        print(f"  {name}: not built: {(reasons or [str(error)])[0]}")
sys.exit(bool(failed))
endef
export BUILD_OPS
