# Needs only Python >= 3.11 and make; everything else goes into .venv.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

HOST ?= 127.0.0.1
PORT ?= 8000
CONFIG ?= serve_config.yaml
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install model serve test lint bench clean

help:  ## list these commands
	@echo "usage: make COMMAND [NAME=VALUE]..."
	@echo
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	    printf '  %-8s  %s\n' "$$name" "$$text"; done

install: $(INSTALLED)  ## make .venv with all that the other commands need

# By PYTHON, or the first of these that is new enough and can make virtual environments.
$(INSTALLED): pyproject.toml constraints.txt
	@for python in $(or $(PYTHON),python3.11 python3 python); do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "making $(VENV) with $$(command -v $$python)"; \
	        exec $$python -m venv $(VENV); \
	    fi; \
	done; \
	echo "No Python >= 3.11 with the modules venv and ensurepip found: install python3.11 (on Debian and Ubuntu" >&2; \
	echo "python3.11-venv, too), or name one: make $(or $(MAKECMDGOALS),install) PYTHON=/path/to/python" >&2; \
	exit 1
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[gguf,test,lint]'
	@touch $@

model: $(INSTALLED)  ## fetch and convert the demo model, once
	@$(BIN)/python -m specdec.runner.fetch demo:smollm2-135m-instruct

serve: $(INSTALLED)  ## serve CONFIG (serve_config.yaml) on HOST (127.0.0.1) and PORT (8000) until Ctrl-C
	@$(BIN)/python -m deployments.run $(CONFIG) --host $(HOST) --port $(PORT)

test: $(INSTALLED) model  ## run the whole test suite; ARGS go to pytest
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)  ## check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

bench: $(INSTALLED) model  ## measure; ARGS go to the benchmark
	$(BIN)/python -m bench $(ARGS)

clean:  ## remove .venv and all caches here (converted models stay in the user's cache folder)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
