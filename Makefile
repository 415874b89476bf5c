# `make demo` shows Trainmaster at work; `make test` is what CI runs.
PY := .venv/bin/python
JOBS ?= 2

.PHONY: help setup demo check test test-long bench docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup:  ## prepare .venv
	@sh scripts/setup.sh

demo: setup  ## start a server, train something small with checkpoints, watch it finish
	@$(PY) examples/demo.py

check: setup  ## lint, types and import arrows
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PY) -m pytest -q tests/unit/test_import_arrows.py
	$(PY) scripts/make_docs.py --check

test: check  ## everything that CI runs
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile -m "not long"

test-long: setup  ## soaks and thousand-job runs, too long for CI
	$(PY) -m pytest -q -m long

bench: setup  ## measure, against what a user would use instead
	$(PY) -m benchmarks

docs: setup  ## write the generated pages
	$(PY) scripts/make_docs.py

clean:  ## remove what the other targets made
	rm -rf .venv .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis
