# Every target works on a fresh clone: the environment is made on first use.
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
BIN := .venv/bin
PARALLEL := --numprocesses 2

.PHONY: setup kl entropy top-p test test-faults test-faults-long test-all check format bench clean

setup: .venv/ready

# torch first and pinned: a range would bring the newest one. TORCH names another build, such as a wheel on disk.
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@

kl entropy top-p: setup
	$(BIN)/python -m tune_study run $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest $(PARALLEL) --dist loadfile -m "not slow and not faults"

# The longest first, so that both processes end together.
test-faults: setup
	$(BIN)/python -m pytest $(PARALLEL) --dist worksteal -m faults tests/faults/test_kills.py tests/faults/test_endings.py

test-faults-long: setup
	$(BIN)/python -m tests.faults

test-all: check
	$(BIN)/python -m pytest

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
