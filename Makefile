# Two commands are all a newcomer needs: `make demo` and `make test`. Both install what they need
# into .venv, in the versions that constraints.txt names.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests at a time: most of them wait for processes or disks, so twice two cores is about right.
WORKERS ?= 4
# Which tests, as pytest's -m takes it: with MARKS='not nightly' also those marked slow.
MARKS ?= not slow and not nightly
# Where they are, or other words of pytest's.
TESTS ?=
PYTEST = $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal
# Python compiles a module when it is first imported: most of what is installed never is.
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# The tests start hundreds of interpreters: if none kept what it compiled, each would compile all
# that it imports, and each worker all tests.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test test-slow test-nightly test-all test-newest test-torch stress check docs dist format bench bench-short clean

help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --constraint constraints.txt --editable '.[torch,elastic]'
	@touch $@

# constraints.txt names everything that the dev extra needs, pip included, but what torch needs of an
# accelerator: so there is next to nothing to resolve, which takes longer than the installation.
# TORCH takes the place of the torch that it names.
$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	sed -E '$(if $(TORCH),s/^torch==.*/torch==$(TORCH).*/)' constraints.txt >$(VENV)/constraints.txt
	$(INSTALL) --constraint $(VENV)/constraints.txt --upgrade pip
	$(INSTALL) --no-deps --requirement $(VENV)/constraints.txt
	$(INSTALL) --no-deps --editable .
	$(INSTALL) --requirement $(VENV)/constraints.txt
	$(BIN)/pip check
	@# A torchao that this torch is too old for would fail wherever transformers imports it.
	@$(BIN)/python -c 'import torchao.optim' 2>/dev/null || $(BIN)/pip uninstall --quiet --yes torchao
	@# Compiled here once, and not by every worker of the tests at the same time.
	@$(BIN)/python -c 'import torch._dynamo, torch.distributed.run'
	@touch $@ $(VENV)/.ready-demo

demo: $(VENV)/.ready-demo  ## Train, kill ranks, resume in other layouts and without a restart
	$(BIN)/remesh demo

test: $(VENV)/.ready-dev  ## Run the tests (those marked slow excepted)
	$(PYTEST) -m '$(MARKS)' $(TESTS)

test-slow: MARKS = slow and not nightly
test-slow: test  ## Run the tests marked slow

test-nightly: MARKS = nightly
test-nightly: test  ## Run the long forms of tests, and print what they covered

test-all: MARKS = not nightly
test-all: test  ## Run the tests with those marked slow

# The newest Python that is claimed.
NEWEST ?= python3.14

test-newest:  ## Run the tests on the newest Python, in an environment of its own
	$(MAKE) test PYTHON=$(NEWEST) VENV=.venv-newest

# Which torch `make test-torch` installs.
VERSION ?= 2.8

# PyPI's wheels of torch are builds for CUDA, some 6 GB an environment. The much smaller ones for the
# CPU are taken with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
test-torch:  ## Run the tests with another torch, such as VERSION=2.8, in an environment of its own
	$(MAKE) test VENV=.venv-torch-$(VERSION) TORCH=$(VERSION)

# How often TESTS run.
ROUNDS ?= 10

stress: $(VENV)/.ready-dev  ## Run TESTS again and again under load
	$(BIN)/python -m tests.stress --rounds $(ROUNDS) -m '$(MARKS)' $(TESTS)

check: $(VENV)/.ready-dev  ## Style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/.ready-dev  ## Make the site of the documentation, in site/; warnings are errors
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs site

dist: $(VENV)/.ready-dev  ## Make the source archive and the wheel, in dist/
	$(BIN)/python -m hatchling build --directory dist

format: $(VENV)/.ready-dev  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready-dev  ## Measure against other systems and the limits of the machine
	$(BIN)/python -m benchmarks.save_load
	$(BIN)/python -m benchmarks.object_store
	$(BIN)/python -m benchmarks.async_save
	$(BIN)/python -m benchmarks.snapshots
	$(BIN)/python -m benchmarks.incremental
	$(BIN)/python -m benchmarks.compression
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.transform_planning
	$(BIN)/python -m benchmarks.reshard
	$(BIN)/python -m benchmarks.foreign
	$(BIN)/python -m benchmarks.megatron
	$(BIN)/python -m benchmarks.elastic
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.master
	$(BIN)/python -m benchmarks.kubernetes
	$(BIN)/python -m benchmarks.goodput

bench-short: $(VENV)/.ready-dev  ## The same in three minutes, small: one table with the limits
	$(BIN)/python -m benchmarks.short

clean:  ## Remove what the commands above made
	rm -rf $(VENV) .venv-newest .venv-torch-* demo-output bench-output build dist site docs/reference .mypy_cache .pytest_cache .ruff_cache
	find benchmarks docs examples src tests -name __pycache__ -prune -exec rm -rf {} +
