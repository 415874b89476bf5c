# `make demo` shows Trainmaster at work; `make test` is what CI runs.
PY := .venv/bin/python
JOBS ?= 3
ARROWS := tests/unit/test_import_arrows.py
# Without the import arrows, which `check` has looked at.
PYTEST := $(PY) -m pytest -q -n $(JOBS) -m "not long" --ignore $(ARROWS)
# Where this is set, every process that a test starts would compile all of Trainmaster anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-dev demo check quick test test-long bench docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup:  ## prepare .venv for running jobs
	@sh scripts/setup.sh train

setup-dev:  ## prepare .venv and .venvs with all that the tests need
	@sh scripts/setup.sh dev

demo: setup  ## start a server, fine-tune a small model, watch it finish
	@$(PY) examples/demo.py

check: setup-dev  ## lint, types and import arrows
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PY) -m pytest -q $(ARROWS)
	$(PY) scripts/make_docs.py --check

quick: check  ## lint, types, unit and API tests, for the inner loop
	$(PYTEST) --ignore tests/api/test_api_fuzz.py --ignore tests/unit/worker/test_environments.py \
		tests/unit tests/fields tests/api

test: check  ## everything that CI runs
	$(PYTEST)

test-long: setup-dev  ## soaks, thousand-job runs and full matrices, too long for CI
	@sh scripts/ray.sh
	$(PY) -m pytest -q -m long

bench: setup-dev  ## measure, against what a user would use instead
	$(PY) -m benchmarks

docs: setup-dev  ## write the generated pages
	$(PY) scripts/make_docs.py
	$(PY) scripts/compatibility.py
	PYTHONPATH=tests $(PY) tests/blackbox/outcomes.py
	PYTHONPATH=tests $(PY) tests/fields/page.py

clean:  ## remove what the other targets made
	rm -rf .venv .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis
