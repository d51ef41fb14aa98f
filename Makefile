# make            what there is
# make test PYTHON=.venv/bin/python
PYTHON ?= python

.PHONY: help lint format types quick test extended exhaustive clients bench docs site package

help:
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

lint: ## ruff: rules and format; proselint: the pages
	$(PYTHON) -m ruff check fsdp2 tests benchmarks deploy setup.py
	$(PYTHON) -m ruff format --check fsdp2 tests benchmarks deploy setup.py
	$(PYTHON) -m proselint check README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs

format: ## mend what ruff can mend
	$(PYTHON) -m ruff check --fix fsdp2 tests benchmarks deploy
	$(PYTHON) -m ruff format fsdp2 tests benchmarks deploy

types: ## mypy, strict
	$(PYTHON) -m mypy

quick: ## the loop of a change: tests without ranks
	$(PYTHON) -m pytest -m 'alone and not slow and not extended and not exhaustive'

test: ## the default tests
	$(PYTHON) -m pytest

extended: ## the long ones that the default leaves out
	$(PYTHON) -m pytest -m 'extended and not exhaustive'

exhaustive: ## all other combinations, for an hour and more
	$(PYTHON) -m pytest -m exhaustive

clients: ## accelerate, transformers, Lightning: needs the extra `clients`
	$(PYTHON) -m pytest -m clients tests/clients tests/recipes

bench: ## measure host time and instructions; rewrite docs/benchmarks.md
	$(PYTHON) -m benchmarks.report --measure host_cost,instructions

docs: ## rewrite docs/benchmarks.md from benchmarks/results; check what tests know of docs
	$(PYTHON) -m benchmarks.report
	$(PYTHON) -m pytest tests/house/test_code_blocks.py tests/house/test_error_catalogue.py \
	  tests/house/test_signatures.py benchmarks/tests/test_report.py

site: ## the docs site, into site/: needs the extra `docs`
	$(PYTHON) -m mkdocs build --strict

package: ## wheel and sdist, into dist/, and a run of the wheel
	.ci/package $$($(PYTHON) -c 'import sys; print(sys.prefix)')
