# `make demo` and `make test` each set everything up from nothing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test integration lint types check wheel clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,report,flower]'
	touch $@

demo: .venv/.installed
	$(BIN)/fedcdp demo --out runs/demo

test: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# Every scenario of a deployment, with real Flower processes on the loopback; its log is kept.
integration: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/integration/flower_log.py results/integration.log.txt

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

check: lint types test

wheel: .venv/.installed
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv runs build dist
