# `make demo` and `make test` work on a fresh machine: each makes .venv and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
HEADERS := $(shell find attngen/cuda/include tests/emulator -name '*.cuh' -o -name '*.?pp')
DIST ?= dist
SPEC ?= examples/specs/gemma3.toml

.PHONY: help demo docs test test-all emulate gpu-test lint types format generated generated-check wheel clean

help:
	@echo 'make demo             bundle the kernels of a model, run them from it, check the result'
	@echo 'make test             tests that need no GPU, but for long sweeps'
	@echo 'make test-all         every test that needs no GPU'
	@echo 'make emulate          kernels on the host, a part of the tests that need a GPU'
	@echo 'make gpu-test         every test that needs one, and sanitizers, with the python3 at hand'
	@echo 'make lint types       ruff and clang-format; mypy --strict'
	@echo 'make format           let ruff and clang-format mend what they can'
	@echo "make generated        write generated/, kernels' hashes and README's tables; generated-check: do they differ?"
	@echo 'make docs             these pages as a site, in build/site; fails on a dead link'
	@echo 'make wheel            build the wheel into dist/'
	@echo 'make clean            remove what make made, .venv included'

# The stamps hold the date of the installation; a changed requirement installs again.
$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt -e '.[compile]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PY) -m pip install -q -c constraints.txt -e '.[compile,jax,bench,dev,docs]'
	@touch $@

demo: $(VENV)/.run
	$(PY) -m attngen bundle build $(SPEC) -o build/demo.attn
	ATTNGEN_DISABLE_JIT=1 PYTHONWARNINGS='ignore:Failed to initialize NumPy' $(PY) examples/demo.py $(SPEC) build/demo.attn

# Tests start hundreds of processes, each of which would compile attngen's modules anew.
unexport PYTHONDONTWRITEBYTECODE

# A worker keeps to tests that follow each other, which share kernels, and takes of the other's rest.
TESTS := -n 2 --dist worksteal --timeout 300 tests/unit
# Threads of torch in each would wait for each other's core.
test test-all: export OMP_NUM_THREADS := 1
test: $(VENV)/.dev
	$(PY) -m pytest --quick $(TESTS)

test-all: $(VENV)/.dev
	$(PY) -m pytest $(TESTS)

# The covering set whole, on kernels of Hopper and of other GPUs; of the tests of these subjects, which vary in more than kernels, one set of
# parameters each.
ONCE := asked_masks backward_kernels backward_parts callable_compiled callable_transforms decode decode_scores dropout fading first_visits folded_grids forward forward_lengths forward_masks \
        forward_onto forward_refusals forward_values heads_apart jax layouts mask_pack mma_decode mma_fp8 mma_learned mma_sync mma_sync_backward nested op padding paged_prompt \
        short softcap varlen waves
EMULATE := $(PY) -m pytest -m 'gpu and not slow' --emulate -n 2 --timeout 300
emulate: $(VENV)/.dev
	$(EMULATE) tests/gpu/test_coverage.py
	ATTNGEN_TARGET=sm_90 $(EMULATE) tests/gpu/test_coverage.py
	$(EMULATE) --each 1 $(ONCE:%=tests/gpu/test_%.py)
	$(EMULATE) --each 16 tests/gpu/test_hostile_integers.py

gpu-test:
	python3 tools/gpu_suite.py -o build/gpu-tests.json

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(VENV)/bin/clang-format --dry-run -Werror $(HEADERS)

types: $(VENV)/.dev
	$(PY) -m mypy

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(VENV)/bin/clang-format -i $(HEADERS)

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

generated: $(VENV)/.run
	$(PY) tools/generate.py
	$(PY) tools/corpus.py
	$(PY) tools/render_readme.py
	$(PY) tools/gallery.py

generated-check: $(VENV)/.run
	$(PY) tools/generate.py --check
	$(PY) tools/corpus.py --check
	$(PY) tools/render_readme.py --check
	$(PY) tools/gallery.py --check

wheel: $(VENV)/.dev
	$(PY) -m build --no-isolation --wheel --outdir $(DIST) .

clean:
	rm -rf $(VENV) build dist
