# make train: install and watch cars learn to cross. make test: every quick check. See docs/quick-start.md.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_FLAGS ?=
JOBS ?= 2

# Paths are relative: the checkout may lie in a folder whose name has a space.
BIN := .venv/bin
PY := $(BIN)/python
# A virtual environment holds absolute paths, so the stamp carries the folder that it was made in.
STAMP := .venv/.installed-$(shell pwd | cksum | cut -d' ' -f1)

# One thread a process: two pools of threads on two cores are many times slower than none.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup train test test-slow bench docs clean distclean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP) ## .venv with everything that training and tests need

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 found: install it, or name one: make setup PYTHON=…" >&2; exit 1; }
	@echo "installing into .venv: PyTorch, SUMO and what tests need are downloaded, about four minutes the first time;" \
		"nothing is shown until that is done"
	@test -e "$@" || "$(PYTHON)" -m venv --clear .venv
	@began=$$(date +%s); $(PY) -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[dev]' && \
		echo "installed in $$(( $$(date +%s) - began )) s"
	@touch "$@"
	@echo "next: make train trains and shows a first policy; .venv/bin/opencda-marl --help lists the rest"

train: setup ## train the quickstart profile for five minutes, then compare it with four controllers
	$(PY) -m opencda_marl.cli run -t sumo-marl/intersection/quickstart

test: setup ## lint, types, layers, docs, quick tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(BIN)/lint-imports
	$(PY) -m mkdocs build --strict --site-dir site
	$(PY) -m pytest -n $(JOBS) --dist loadfile

test-slow: setup ## long learning and drills
	$(PY) -m pytest -n $(JOBS) --dist loadfile -m 'slow and not gpu' --timeout 2400

bench: setup ## what a step, an action, an update and a run cost here
	$(PY) benchmarks/run_all.py --json benchmarks/results.json

docs: setup ## the settings' table from settings/, then the pages in site/
	$(PY) -m opencda_marl.config_reference docs/configuration.md
	$(PY) -m mkdocs build --strict --site-dir site

clean: ## caches and built pages; runs and .venv stay
	rm -rf site build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis ./*.egg-info
	find opencda_marl tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## .venv too
	rm -rf .venv
