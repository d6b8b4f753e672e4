# Everything runs in a virtual environment of its own, made from the pinned versions of requirements.lock.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test check docs bench fuzz clean
.DEFAULT_GOAL := test

setup: .venv/ready

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("clknn needs Python 3.11 or newer; set PYTHON=") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: setup  ## adapt a real model to a real translation memory, and show the difference
	$(BIN)/python examples/demo.py

test: setup  ## every test
	$(BIN)/python -m pytest

check: setup  ## style, types, and documents that must be true
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup  ## write anew what documents quote: --help and results
	$(BIN)/python docs/make_pages.py

bench: setup  ## the numbers of the README, on this machine
	$(BIN)/python bench/force_decoding.py
	$(BIN)/python bench/decode.py
	$(BIN)/python bench/training.py
	$(BIN)/python bench/importing.py

fuzz: setup  ## 20,000 mutated files of every format
	$(BIN)/python tests/fuzz.py --inputs 20000

clean:
	rm -rf .venv demo.store build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
