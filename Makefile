# The commands of this project. Each installs what it needs, once, into .venv.
PYTHON ?= python3
WORKDIR ?= runs/quickstart
# The parity tests need a CPU build. Where the package index holds a CUDA build
# under this name, give a wheel's path, or let PIP_FIND_LINKS name its folder.
TORCH ?= torch==2.13.0
# One process a core of the smallest machine that we mean to run on.
PYTEST_ARGS ?= -n 2

BIN := .venv/bin
# What a run does not import need not be compiled to bytecode.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile

.PHONY: quickstart test slow check parity chaos

quickstart: .venv/core.stamp
	$(BIN)/python -m dora_jax.main --config=configs/quickstart.py \
	  --workdir=$(WORKDIR)

test: .venv/dev.stamp
	$(BIN)/python -m pytest -m "not slow and not parity" $(PYTEST_ARGS)

slow: .venv/dev.stamp
	$(BIN)/python -m pytest -m slow

chaos: .venv/dev.stamp
	$(BIN)/python -m benchmarks.chaos --out=runs/chaos

parity: .venv/parity.stamp
	$(BIN)/python -m pytest -m parity

check: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright

.venv/core.stamp: pyproject.toml
	@echo "Installing into .venv (about a minute) ..."
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) --editable .
	@touch $@

.venv/dev.stamp: .venv/core.stamp
	$(PIP_INSTALL) --editable ".[dev]"
	@touch $@

.venv/parity.stamp: .venv/dev.stamp
	$(PIP_INSTALL) $(TORCH)
	@touch $@
