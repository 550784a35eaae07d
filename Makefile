# Two commands do everything from a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types docs clean

demo: $(VENV)/ready
	@$(BIN)/python -m benchmarks.demo

test: lint types
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/ready
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/ready
	@$(BIN)/mypy

docs: $(VENV)/ready
	@$(BIN)/pip install -q -e '.[docs]' -c constraints.txt && $(BIN)/mkdocs build --strict

# The environment is remade when what it installs changes, and only then.
$(VENV)/ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
