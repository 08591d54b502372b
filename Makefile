# make venv            .venv with tiercel and what its tests need, versions pinned by constraints.txt
# make demo            train a small VLM on real handwriting; report in runs/demo/report.html
# make test            the tests, under 10 minutes on 2 cores
# make lint types      ruff, mypy
# make test-families   the families' tests with the oldest and the newest transformers that pyproject.toml admits
# make docs            what is generated in docs/

PYTHON ?= $(shell command -v python3.11 || command -v python3)
OLDEST_TRANSFORMERS := 5.17.0
NEWEST_TRANSFORMERS := 5.23.0
# A CPU build of torch takes torchvision's Python part alone; tests/conftest.py declares its missing operators.
TORCHVISION := 0.28.0

.PHONY: venv demo test lint types test-families docs clean

venv: .venv/.made

.venv/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	.venv/bin/tiercel demo

test: venv
	.venv/bin/python -m pytest

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: venv
	.venv/bin/mypy

docs: venv
	.venv/bin/python -m tiercel.config.reference > docs/recipe.md

test-families: .venv-families-oldest/.made .venv-families-newest/.made
	@echo "transformers $(OLDEST_TRANSFORMERS)"
	.venv-families-oldest/bin/python -m pytest tests/models
	@echo "transformers $(NEWEST_TRANSFORMERS)"
	.venv-families-newest/bin/python -m pytest tests/models

.venv-families-oldest/.made: TRANSFORMERS = $(OLDEST_TRANSFORMERS)
.venv-families-newest/.made: TRANSFORMERS = $(NEWEST_TRANSFORMERS)
.venv-families-%/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-families-$*
	grep -v -E '^(transformers|huggingface_hub|tokenizers)==' constraints.txt > .venv-families-$*/constraints.txt
	.venv-families-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-c .venv-families-$*/constraints.txt -e '.[dev]' transformers==$(TRANSFORMERS)
	.venv-families-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		torchvision==$(TORCHVISION)
	touch $@

clean:
	rm -rf .venv .venv-families-oldest .venv-families-newest runs build dist *.egg-info
