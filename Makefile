# `make` shows the targets. Every target builds the environment first where it is missing: python3 (3.11 or later, with
# venv), make and an internet connection (or a wheel directory that pip knows) are all that is needed; no compiler.

PYTHON ?= python3
VENV ?= .venv
# More arguments for pip, for example an index with CPU-only torch: make demo PIP_ARGS='--index-url ...'
PIP_ARGS ?=
# More arguments for the command that demo and test run: make test ARGS='-m "not slow" -x'
ARGS ?=
# Processes that share the tests, such as 4 or auto; 0: one after the other. Many tests wait for drives and child
# processes, so that two take little more than half the time on two cores.
WORKERS ?= 2
# A directory on the drive that bench and gpu measure: make bench DIR=/mnt/nvme0
DIR ?= .
# A directory for what gpu finds
OUT ?= outputs/gpu

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
# $(call or_fail,ADVICE) behind a command of the setup: the end of the log, where all of it is, and what to do.
or_fail = || { tail -n 12 $(LOG); printf '\nThe setup failed; all of the log: %s\n%s\n' $(LOG) "$(1)"; exit 1; } >&2
NO_PYTHON := Found no $(PYTHON). Name a Python 3.11 or later: make PYTHON=/path/to/python3 ...
NO_VENV := $(PYTHON) has no venv module. Install it (Debian, Ubuntu: apt install python3-venv), or name another Python: make PYTHON=...
NO_PACKAGES := Is there a network, and room on the disk? Then try again. Another index: make PIP_ARGS='--index-url URL' ... \
	Wheels in a directory: make PIP_ARGS='--no-index --find-links DIR' ...

.DEFAULT_GOAL := help
.PHONY: help demo test exhaustive gpu lint format bench compat clean

help: ## show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## train a small GPT with and without the SSD: what is saved, at what cost, and that the weights are equal
	$(BIN)/python -m recipes.demo $(ARGS)

test: $(STAMP) ## all tests that this machine can run
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

exhaustive: $(STAMP) ## what goes on where the tests have begun: 3,000 interrupts, thousands of random programs (half an hour)
	$(BIN)/python -m pytest -n $(WORKERS) -m exhaustive $(ARGS)

# Without .venv, a python3 that has torch, Lightning, xxhash and pytest will do: a machine with a card may have no internet.
ifneq ($(filter gpu,$(MAKECMDGOALS)),)
OWN := $(shell test -x $(BIN)/python || { $(PYTHON) -c 'import torch, lightning, xxhash, pytest' 2>/dev/null && echo $(PYTHON); })
endif
gpu: $(if $(OWN),,$(STAMP)) ## on a machine with a CUDA card, in nine minutes: its tests, bits, steps, drives, states; a table in OUT
	$(or $(OWN),$(BIN)/python) -m recipes.gpu --dir $(DIR) --out $(OUT) $(ARGS)

lint: $(STAMP) ## ruff, formatting, mypy --strict on the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## measure storage against fio, and steps against keeping, recomputing and naive disk hooks
	$(BIN)/python -m recipes.benchmarks.io --dir $(DIR)
	$(BIN)/python -m recipes.benchmarks.step --dir $(DIR)

compat: $(STAMP) ## two public projects, then fast tests with each Python, PyTorch and Lightning that can be had (slow)
	PIP_ARGS='$(PIP_ARGS)' $(BIN)/python -m pytest -m compat tests/compat
	$(BIN)/python -m recipes.compat.matrix --pip-args='$(PIP_ARGS)' $(ARGS)

clean: ## remove the environment and caches; outputs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The stamp is younger than what it was built from, so that the environment is made once and again after a change.
# Many tests start interpreters. Where the environment forbids Python to write bytecode, each would compile all of
# PyTorch again: hence compileall. Templates among the packages do not compile, which is no error.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(NO_PYTHON)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "lightning_ssd needs Python 3.11 or later, got %d.%d; name another: make PYTHON=python3.12 ..." % v[:2])'
	@mkdir -p $(VENV)
	@test -x $(BIN)/pip || { echo "creating $(VENV) ..."; $(PYTHON) -m venv $(VENV) >$(LOG) 2>&1; } $(call or_fail,$(NO_VENV))
	@echo "installing PyTorch, Lightning and the tools, which takes minutes (log in $(LOG)) ..."
	@$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[recipes,dev]' >$(LOG) 2>&1 $(call or_fail,$(NO_PACKAGES))
	@echo "compiling ..."
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $(STAMP)
