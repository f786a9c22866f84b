# Each target sets up .venv by itself, once, and again when the project file or the pins change.
PYTHON ?= python3
PYTEST_ARGS ?= -n auto
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
# accelerate's own tests are in its source distribution only; tests/downstream runs them.
DOWNLOAD := $(BIN)/python -m pip download -qq --disable-pip-version-check --no-deps \
  --no-binary accelerate --dest $(VENV)/downstream

# pyright's wheel holds pyright itself, so it need not ask the network for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help setup test demo docs lint check browser versions clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   make $(VENV) and install everything into it"
	@echo "make demo    the main job on a tiny model: plan, refuse, load, verify"
	@echo "make test    the test suite (PYTEST_ARGS='-k name' to choose)"
	@echo "make docs    the documentation, to docs/_build/html; a warning is an error"
	@echo "make lint    ruff, mypy and pyright"
	@echo "make check   lint, then test"
	@echo "make browser install Chromium, for tests that look at pages (Debian, as root)"
	@echo "make versions  a part of the tests with other versions of the dependencies (hours, GBs)"
	@echo "make clean   remove $(VENV) and caches"

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "modelquirks needs Python 3.11 or later, but '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1). Choose another: make setup PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch comes first and by its exact version: pip then takes a build for the CPU where one is on
# disk, instead of the newest one with all that it needs for GPUs. `--group` needs pip 25.1.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV). The first time, this takes minutes."
	@$(PIP) --upgrade 'pip>=25.1'
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --build-constraint constraints.txt --editable '.[transformers]' --group dev
	@$(DOWNLOAD) "$$(grep '^accelerate==' constraints.txt)" || \
	  echo "accelerate's own tests could not be downloaded: tests/downstream will not run." >&2
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright

check: lint test

browser:
	@command -v chromium >/dev/null || { \
	  apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; }

versions: $(STAMP)
	$(BIN)/python benchmarks/versions.py
	$(BIN)/python benchmarks/versions.py --write docs/versions.md

clean:
	rm -rf $(VENV) dist docs/_build docs/reference/generated .mypy_cache .ruff_cache .pytest_cache .hypothesis
