# Everything a fresh machine needs: python3 (3.11+), make and a package index.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST_FLAGS ?= -n 2 --dist worksteal -q

# Some machines forbid bytecode; without it every program that a test starts compiles the host anew, for 15 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test lint format bench clean
setup: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[dev]"
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m avalanche_amnesia demo $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

bench: $(READY)
	$(BIN)/python -m benchmarks.step_cost

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
