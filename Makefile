# Two commands do everything on a machine with Python ≥ 3.10, pip and make:  make demo   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU_VENV := .venv-gpu
GPU_READY := $(if $(filter Linux,$(shell uname)),$(GPU_VENV)/ready)
GPU_TESTS := $(GPU_VENV)/bin/python -m pytest -n 2 tests/attention/test_triton.py tests/attention/test_triton_compiled.py
C_FILES := src/locant/attention/fused.c tests/attention/fused_fuzz.c

.PHONY: demo test slow docs dist lint types format clean fuzz hostile mutants mutants-all kill sanitize census census-check gpu-proof gpu-compiled

demo: $(VENV)/ready
	$(BIN)/locant compare clm --schemes learned,nope,tisa,alibi,rope --seeds 2 --budget 40s -o demo/compare

test: $(VENV)/ready lint types $(GPU_READY)
	$(BIN)/python -m pytest -n 2 -m "not slow"
	$(if $(GPU_READY),$(GPU_TESTS) -m "not slow")

slow: $(VENV)/ready $(GPU_READY)
	$(BIN)/python -m pytest -n 2 -m slow
	$(if $(GPU_READY),$(GPU_TESTS) -m slow)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/oxlint --deny-warnings src/locant/report/page.js

types: $(VENV)/ready
	$(BIN)/mypy

# The documentation: build/docs/index.html. Search needs a server: python -m http.server -d build/docs
docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	LOCANT_SITE=build/docs $(BIN)/python -m pytest tests/site/test_built.py

# Wheel and sdist, in dist/.
dist: $(VENV)/ready
	$(BIN)/python -m hatchling build -t sdist -t wheel -d dist

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

# The Triton kernels without a GPU; docs/gpu.md has the results. CALLS random calls in the interpreter, 0.6 s of CPU each.
CALLS ?= 500
gpu-proof: $(GPU_VENV)/ready
	$(GPU_TESTS)
	TRITON_INTERPRET=1 $(GPU_VENV)/bin/python -m reliability.gpu equality --calls $(CALLS)

gpu-compiled: $(GPU_VENV)/ready
	$(GPU_VENV)/bin/python -m reliability.gpu compiled

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

# Triton and everything in $(VENV). An environment of its own: with triton installed, every program that imports
# transformers ends with warnings of triton.
$(GPU_VENV)/ready: $(VENV)/ready
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --no-deps $$(grep -o '^triton==[0-9.]*' constraints.txt)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/locant-test.pth
	touch $@

$(VENV)/docs-ready: $(VENV)/ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(GPU_VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
