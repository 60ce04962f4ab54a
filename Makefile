# All targets run in .venv, which make creates. Caches are in .cache.
#
#   PYTHON=python3.12     the interpreter of .venv
#   PIP_ARGS=...          arguments of every pip install, for example the index of a CPU-only torch
#   ARGS=...              arguments of pytest or the demo: make test ARGS="tests/core -x"
#   BENCHMARKS=...        which benchmark:   make bench BENCHMARKS=examples/benchmarks/background.py
#   SEED=812              seed of test-long; the default is the time, which is printed
#   JOBS=0                run all tests in one process; the default keeps two cores busy

PYTHON   ?= python3
PIP_ARGS ?=
ARGS     ?=
JOBS     ?= 3
SEED     ?= $(shell date +%s)

VENV    := .venv
PY      := $(VENV)/bin/python
PYTEST  := $(PY) -m pytest
# One process runs all tests of a file, because they share expensive set-up.
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
SOURCES := $(wildcard lightning_elastic_zero tests examples)
BENCHMARKS ?= examples/benchmarks/save_load.py

INSTALLED := $(VENV)/.installed
# DeepSpeed compiles its operator for offload to NVMe against libaio.
OPS_BUILT := .cache/ops-built$(if $(wildcard /usr/include/libaio.h),-with-libaio)

# DeepSpeed takes ninja from PATH. Another ninja would rebuild everything.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Lets pytest cache the test modules that it rewrites, which takes each process 4 s.
unexport PYTHONDONTWRITEBYTECODE
# Ranks share the processor.
export OMP_NUM_THREADS := 1

# DeepSpeed selects its accelerator at import and prefers CUDA, also in tests of CPU ranks. Each
# accelerator has its own folder of compiled operators.
demo docs test test-long test-releases soak bench ops: export DS_ACCELERATOR := cpu
demo test test-long test-releases soak bench ops: export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions/cpu
test-gpu bench-gpu: export DS_ACCELERATOR := cuda
test-gpu bench-gpu: export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions/cuda

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo docs test test-long test-releases test-gpu soak lint format wheel bench bench-gpu ops clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ops ## Train on 4 processes, resume on 2, then on 3, and compare with an uninterrupted run
	$(PY) examples/demo.py $(ARGS)

test: ops ## Run the quick tests
	$(PYTEST) -m "not (long or gpu or releases)" $(SIDE_BY_SIDE) $(ARGS)

test-long: ops ## Run all tests: full matrices, faults, random search
	$(PYTEST) -m "not (gpu or releases)" --hypothesis-seed=$(SEED) $(SIDE_BY_SIDE) $(ARGS)

test-releases: $(INSTALLED) ## Run the core tests in environments with other releases
	$(PYTEST) -m releases $(ARGS)

test-gpu: ops ## Run the device tests on this machine's GPUs, on one: ARGS=--share-gpu, on CPUs: ARGS=--device=cpu
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	@find $(TORCH_EXTENSIONS_DIR) -name lock -delete
	$(PYTEST) -m "gpu or device" $(ARGS)

soak: ops ## Kill and restart a run at random for an hour: ARGS="--minutes 10 --nodes"
	$(PY) -m tests.jobs.soak $(ARGS)

lint: $(INSTALLED) ## Check style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy $(SOURCES)

format: $(INSTALLED) ## Format the code and fix what ruff can fix
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

# -E rebuilds every page: an unchanged page would not repeat its warnings.
docs: $(INSTALLED) ## Build the site, .cache/site/docs/index.html; a warning fails
	$(PY) -m sphinx -q -E -W --keep-going -d .cache/doctrees -c docs . .cache/site

wheel: $(INSTALLED) ## Build and check dist/*.whl
	rm -rf dist
	$(PY) -m build --wheel --no-isolation --outdir dist
	$(PY) -m twine check --strict dist/*.whl

bench: ops ## Compare saving and loading with other software
	@set -e; for script in $(BENCHMARKS); do echo "$$script"; $(PY) $$script $(ARGS); done

# Stock's, this library's and torch's checkpoints and raw copies need 8 times the state on the disk.
bench-gpu: ops ## The same on one GPU, with 6 GB of state: ARGS="--parameters 1.6e9" for 20 GB
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	$(PY) examples/benchmarks/save_load.py --device cuda --parameters 5e8 --pairs 1:1 --precisions fp32 bf16 --rounds 3 \
	  --no-universal $(ARGS)

clean: ## Remove caches and outputs of runs
	rm -rf .cache .hypothesis build dist lightning_logs runs demo_output
	find lightning_elastic_zero tests examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## Remove .venv too
	rm -rf $(VENV)

# torch is installed first, in its pinned version, so that no dependency selects another build.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@

# A process that is killed while it builds an operator leaves a lock, on which later processes hang.
# No other run may be in progress in this checkout.
ops: $(OPS_BUILT)
	@find $(TORCH_EXTENSIONS_DIR) -name lock -delete

# Operators are compiled in advance, so that ranks do not wait for them within the timeout of a test.
# Without a working compiler, the next call tries again.
$(OPS_BUILT): $(INSTALLED)
	@mkdir -p $(TORCH_EXTENSIONS_DIR)
	@find $(TORCH_EXTENSIONS_DIR) -name lock -delete
	@echo "Building DeepSpeed's CPU operators (once, for some minutes)."
	@if timeout --foreground 900 $(PY) -c "$$BUILD_OPS" 2> .cache/ops-build.log; then touch $@; \
	else echo "The build failed (.cache/ops-build.log); the next run will try again."; fi

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
