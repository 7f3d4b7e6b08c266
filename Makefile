# Two commands are all a newcomer needs: `make demo` and `make test`. Both install what they need
# into .venv, in the versions that constraints.txt names.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests at a time: most of them wait for processes or disks, so twice two cores is about right.
WORKERS ?= 4
PYTEST = $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test test-slow test-nightly test-all check format bench clean

help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[torch]'
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.ready-demo

demo: $(VENV)/.ready-demo  ## Train, kill a rank in the middle of a save, resume in other layouts
	$(BIN)/remesh demo

test: $(VENV)/.ready-dev  ## Run the tests (those marked slow excepted)
	$(PYTEST)

test-slow: $(VENV)/.ready-dev  ## Run the tests marked slow
	$(PYTEST) -m slow

test-nightly: $(VENV)/.ready-dev  ## Run the tests marked nightly
	$(BIN)/pytest -m nightly --log-cli-level=INFO

test-all: test test-slow  ## Run all tests

check: $(VENV)/.ready-dev  ## Style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.ready-dev  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready-dev  ## Measure against other systems and the limits of the machine
	$(BIN)/python -m benchmarks.save_load
	$(BIN)/python -m benchmarks.async_save
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.transform_planning
	$(BIN)/python -m benchmarks.reshard
	$(BIN)/python -m benchmarks.megatron
	$(BIN)/python -m benchmarks.elastic
	$(BIN)/python -m benchmarks.master

clean:  ## Remove what the commands above made
	rm -rf $(VENV) demo-output bench-output build dist .mypy_cache .pytest_cache .ruff_cache
