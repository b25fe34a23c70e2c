# Two commands do everything on a machine with Python ≥ 3.10, pip and make:  make demo   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
C_FILES := src/locant/attention/fused.c tests/attention/fused_fuzz.c

.PHONY: demo test lint types format clean fuzz hostile mutants mutants-all kill sanitize census census-check

demo: $(VENV)/ready
	$(BIN)/locant compare clm --schemes learned,nope,tisa,alibi,rope --seeds 2 --budget 40s -o demo/compare

test: $(VENV)/ready lint types
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/oxlint --deny-warnings src/locant/report/page.js

types: $(VENV)/ready
	$(BIN)/mypy

# Longer checks; docs/reliability.md describes them and has their results.
CASES ?= 100000
fuzz: $(VENV)/ready
	$(BIN)/python -m reliability.fuzz --cases $(CASES) --processes 2

hostile: $(VENV)/ready
	$(BIN)/python -m reliability.hostile

mutants: $(VENV)/ready
	$(BIN)/python -m reliability.mutants --changed

mutants-all: $(VENV)/ready
	$(BIN)/python -m reliability.mutants --all

kill: $(VENV)/ready
	$(BIN)/python -m reliability.kill

sanitize: $(VENV)/ready
	$(BIN)/python -m reliability.sanitize

# Every text architecture of transformers, built tiny, swapped and checked; docs/census.md has the results.
census: $(VENV)/ready
	$(BIN)/python -m census

census-check: $(VENV)/ready
	$(BIN)/python -m census --check

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

# torch first and by exact version: a plain "torch" may pull gigabytes of GPU libraries.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "locant needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
