# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check coverage test-torch lint types exactness mutants fuzz docs clean

demo: $(VENV)/ready
	@$(BIN)/python -m benchmarks.demo

test: lint types
	@$(BIN)/python -m pytest -n 2 --dist loadfile

# Lint, types and the tests of what changed since BASE, a commit: what to run before each commit.
BASE ?= HEAD
check: lint types
	@files=$$($(BIN)/python -m benchmarks.affected $(BASE)); \
		if [ -z "$$files" ]; then echo "no test concerns what changed since $(BASE)"; \
		else $(BIN)/python -m pytest -n 2 --dist loadfile $$files; fi

# Which lines of the package no test runs; takes twice as long as `make test`.
coverage: $(VENV)/ready
	@$(BIN)/python -m coverage run --source=src/oomph -m pytest -n 0 $(TESTS)
	@$(BIN)/python -m coverage report --skip-covered --sort=cover

lint: $(VENV)/ready
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-logo

types: $(VENV)/ready
	@$(BIN)/mypy

# The tests with another version of PyTorch, in an environment of its own: `make test-torch TORCH=2.11.0`.
# It takes builds for the CPU. Where those have no `+cpu` in their version, as on macOS: `TORCH_BUILD=`.
TORCH ?= $(patsubst torch==%,%,$(filter torch==%,$(file < constraints.txt)))
TORCH_BUILD ?= +cpu
TORCH_INDEX ?=
TESTS ?= tests
TORCH_VENV := .venv-torch-$(TORCH)
test-torch: $(TORCH_VENV)/ready
	@$(TORCH_VENV)/bin/python -c 'import torch; print("torch", torch.__version__)'
	@$(TORCH_VENV)/bin/python -m pytest -n 2 --dist loadfile $(TESTS)

$(TORCH_VENV)/ready: pyproject.toml constraints.txt
	@echo "setting up $(TORCH_VENV) (some minutes, once)"
	@test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	@{ grep -v '^torch==' constraints.txt; echo 'torch==$(TORCH)$(TORCH_BUILD)'; } > $(TORCH_VENV)/constraints.txt
	@$(TORCH_VENV)/bin/pip install -q --disable-pip-version-check 'torch==$(TORCH)$(TORCH_BUILD)' $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) || { \
		echo "no torch $(TORCH) for the CPU and $$($(TORCH_VENV)/bin/python -V) where pip looks:"; \
		echo "name an index that has it, as TORCH_INDEX=https://download.pytorch.org/whl/cpu"; exit 1; }
	@$(TORCH_VENV)/bin/pip install -q --disable-pip-version-check -e '.[dev]' -c $(TORCH_VENV)/constraints.txt
	@touch $@

# Plans called exact, held against the untouched trainings of a zoo of models: hours, not minutes.
exactness: $(VENV)/ready
	@$(BIN)/python -m benchmarks.exactness

# Small changes to the code, each of which a test should notice: hours, too.
mutants: $(VENV)/ready
	@$(BIN)/python -m benchmarks.mutants

# A hundred thousand damaged files for all loaders: some minutes. `make fuzz CASES=… FROM=…` for more.
CASES ?= 100000
FROM ?= 0
fuzz: $(VENV)/ready
	@$(BIN)/python -m benchmarks.fuzz --cases $(CASES) --from $(FROM)

docs: $(VENV)/ready
	@$(BIN)/pip install -q -e '.[docs]' -c constraints.txt && $(BIN)/mkdocs build --strict

# The environment is remade when what it installs changes, and only then.
$(VENV)/ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-torch-* .mypy_cache .ruff_cache .pytest_cache
