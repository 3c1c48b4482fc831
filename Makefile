# Two commands matter: `make run` serves a guarded demo model, `make test` proves that it works.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS ?=

.PHONY: help run test test-fast test-gpu check fix demo engines bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[embedded,demo]'
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[embedded,demo,dev]'
	touch $@ $(VENV)/.run

run: $(VENV)/.run  ## set up and serve the demo model under guard (ARGS='--port 9000 ...')
	$(BIN)/kvguard serve $(ARGS)

test: $(VENV)/.dev  ## set up and run every test that this machine can run
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(VENV)/.dev  ## the tests that start no engine
	$(BIN)/python -m pytest -m 'not engine and not cgroup' $(ARGS)

check: $(VENV)/.dev  ## lint, format and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(VENV)/.dev  ## lint and format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

engines: $(VENV)/.dev  ## build the heavier real engines (llama.cpp, vLLM) into a cache outside the checkout
	$(BIN)/python scripts/engines.py all

demo: $(VENV)/.dev  ## the same load on an engine alone and through kvguard, on real engines
	$(BIN)/python scripts/engines.py llama.cpp
	$(BIN)/python bench/demo.py $(ARGS)

clean:  ## remove what the targets above made in the checkout
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
