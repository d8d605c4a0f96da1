# make quickstart   set up what the example needs, run it
# make test         set up everything, then lint, types, and the tests
# make test-all     the slow tests too
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
# Two set-ups at once would install into the same .venv.
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TYPES := build/types
PYTEST_ARGS ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# The tested versions, also for what pip builds on the way.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help quickstart test test-all lint format types clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

quickstart: $(VENV)/.ready-examples
	$(BIN)/python examples/quickstart.py

# Two processes run the tests, file by file; what refusals they met is looked at when both are done.
test: lint types
	rm -rf build/refusals
	$(PYTEST) -n 2 --dist loadfile $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(PYTEST) tests/test_every_refusal.py)

test-all: lint types
	rm -rf build/refusals
	$(PYTEST) -n 2 --dist loadfile -m "slow or not slow" $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(PYTEST) tests/test_every_refusal.py)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# primitives/ and kernels/ are mapped into slapo_py, which a type checker can't see in place: it reads the built wheel.
# build/lib goes first, because setuptools would pack files that were deleted since.
types: $(VENV)/.ready-dev
	rm -rf $(TYPES) build/lib
	$(BIN)/python -m build --wheel --outdir $(TYPES)/dist . > /dev/null
	$(BIN)/python -m pip install --quiet --no-deps --target $(TYPES)/site $(TYPES)/dist/*.whl
	cd $(TYPES) && MYPYPATH=site $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache/wheel -p slapo_py

clean:
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps let a second run start at once. A .venv made by hand has none, and is only completed.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-examples: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e ".[examples]"
	touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -e ".[dev]"
	touch $(VENV)/.ready-examples $@
