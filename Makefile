# setup  makes .venv with what demo, test and check need (demo, test ... call it)
# demo   grows rollout trees in two environments with the embedded model
# test   runs the tests
# check  linters, types, layers, import time
# bench  runs every script of bench/, one after the other
# docs   builds the site from docs/ into site/
# clean  removes what these made, runs/ and .venv excepted
PYTHON ?= python3
# cpu or cuda; without it, cuda where there is an NVIDIA driver.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)

BIN := .venv/bin
STAMP := .venv/.setup-done
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_VERSION := $(shell sed -n 's/^torch==//p' .ci/constraints.txt)

.PHONY: setup demo test check bench docs clean demo-searchqa demo-blocksworld lint .lint types layers import-time
.NOTPARALLEL:

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { \
	  echo "agentgym needs Python 3.11 or 3.12; '$(PYTHON)' is '$$($(PYTHON) --version 2>&1)'." >&2; \
	  echo "Name another one: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# torch comes first and pinned: an unpinned one resolves to a CUDA build of several GB.
$(STAMP): pyproject.toml .ci/constraints.txt .ci/install-torch | $(BIN)/python
	.ci/install-torch $(TORCH) $(TORCH_VERSION) $(PIP)
	$(PIP) install -c .ci/constraints.txt -e '.[torch,mcp,adapters,dev]'
	@touch $@

demo: demo-searchqa demo-blocksworld

demo-searchqa: ENV := agentgym/SearchQA-v0
demo-blocksworld: ENV := agentgym/Blocksworld-v0
demo-searchqa demo-blocksworld: $(STAMP)
	rm -rf runs/$@
	$(BIN)/agentgym rollout $(ENV) --policy tiny --allocator trace --tasks 16 --step-tasks 8 \
	  --budget 128 --seed 0 --out runs/$@
	$(BIN)/agentgym inspect runs/$@
	$(BIN)/agentgym view runs/$@

test: $(STAMP)
	$(BIN)/pytest -n 2

# `make -k check` goes on after the first that fails.
check: lint types layers import-time

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.lint: $(STAMP)
	$(BIN)/python .ci/linktree.py

types: .lint
	cd .lint && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache/lint -p agentgym

layers: .lint
	cd .lint && ../$(BIN)/lint-imports --no-logo --no-cache ../pyproject.toml

import-time: $(STAMP)
	$(BIN)/python .ci/import_time.py

bench: $(STAMP)
	@for script in $(sort $(filter-out bench/_%,$(wildcard bench/*.py))); do \
	  echo "== $$script"; $(BIN)/python $$script || exit 1; done

docs: $(STAMP)
	$(BIN)/mkdocs build --quiet --clean

clean:
	rm -rf .lint .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist site *.egg-info
	find agentgym envs rollout trainers sandboxes tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
