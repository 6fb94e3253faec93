# Everything a fresh machine needs: python3 (3.11+), make and a package index.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST_FLAGS ?= -n 2 --dist worksteal -q
TESTS ?= tests
# Two jobs, each with its own closing line: the core by itself, and what stands around it.
AROUND := tests/contrib tests/lab tests/scripts
CORE := tests $(AROUND:%=--ignore=%)

# Some machines forbid bytecode; without it every program that a test starts compiles the host anew, for 15 seconds.
unexport PYTHONDONTWRITEBYTECODE

# The inner loop: style, and the tests that need no long training.
QUICK := tests/test_checks.py tests/test_bits.py tests/test_ledger.py tests/test_transaction.py tests/test_wings.py \
  tests/training/test_hat_formulas.py tests/models/test_gate.py tests/trajectory/test_removal.py tests/unlearning/test_claims.py

.PHONY: setup demo quick test test-core test-around lint types docs notebook tables format bench package lowest newest clean
setup: $(READY)

$(READY): pyproject.toml
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[dev]"
	touch $(READY)

# The script of docs/pretrained.md with ARGS=--pretrained.
demo: $(READY)
ifeq ($(ARGS),--pretrained)
	mkdir -p runs
	sed -n '/^```python/,/^```$$/{/^```/!p;}' docs/pretrained.md > runs/pretrained.py
	$(BIN)/python runs/pretrained.py
else
	$(BIN)/python -m avalanche_amnesia demo $(ARGS)
endif

lint: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/budget.py

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

notebook: $(READY)
	WANDB_MODE=offline $(BIN)/jupyter nbconvert --to notebook --execute --ExecutePreprocessor.record_timing=False --inplace docs/first_request.ipynb

tables: $(READY)
	$(BIN)/python -m experiments.shown_tables

# mypy and the site are made beside the tests, whose processes need a while to begin; what they say comes in one piece.
test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/budget.py
	@{ said=$$($(MAKE) --no-print-directory --keep-going types docs 2>&1); status=$$?; echo "$$said"; exit $$status; } & \
	beside=$$!; $(MAKE) --no-print-directory --keep-going test-core test-around; tests=$$?; \
	wait $$beside || { echo "mypy or the site failed: see above, or make lint docs" >&2; exit 1; }; \
	exit $$tests

quick: $(READY)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(QUICK)

test-core: $(READY)
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(CORE)

test-around: $(READY)
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(AROUND)

bench: $(READY)
	$(BIN)/python -m benchmarks $(ARGS)

# The wheel, made from the sdist, away from the sources: first without any extra, then with the lab.
package: $(READY)
	rm -rf build/package
	$(BIN)/uv build --quiet --out-dir build/package/dist
	$(BIN)/uv venv --quiet build/package/venv
	$(BIN)/uv pip install --quiet --python build/package/venv build/package/dist/*.whl
	cp tests/support/installed.py build/package/
	cd build/package && venv/bin/python -I installed.py
	$(BIN)/uv pip install --quiet --python build/package/venv "$$(echo $(CURDIR)/build/package/dist/*.whl)[lab]"
	cd build/package && venv/bin/amnesia --help >/dev/null

# The oldest version of each direct dependency; and the newest Avalanche and torch, whatever the bounds say.
lowest: $(READY)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-lowest
	$(BIN)/uv pip install --python $(VENV)-lowest --resolution lowest-direct -e ".[dev]"
	$(VENV)-lowest/bin/python -m pytest $(PYTEST_FLAGS) $(TESTS)

newest: $(READY)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-newest
	$(BIN)/uv pip install --python $(VENV)-newest -e ".[dev]"
	$(BIN)/uv pip install --python $(VENV)-newest --upgrade avalanche-lib torch torchvision
	$(VENV)-newest/bin/python -m pytest $(PYTEST_FLAGS) $(TESTS)

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest build .cache runs .pytest_cache .mypy_cache .ruff_cache
