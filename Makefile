# `make demo` and `make test` each set everything up from nothing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test integration audits crashes soak load lint types check docs wheel clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,report,flower,docs]'
	touch $@

demo: .venv/.installed
	$(BIN)/fedcdp demo --out runs/demo

test: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every scenario of a deployment, with real Flower processes on the loopback; its log is kept.
integration: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/integration/flower_log.py results/integration.log.txt

# What attacks prove of ε, over all methods, conventions and samplings, and on sabotaged mechanisms: some ten minutes.
audits: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/audit_table.py --grid

# Trainings killed at every call that changes a file and at random moments, full disks: about half an hour on two free cores.
DEVICE ?= cpu
crashes: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/reliability/crashes.py --device $(DEVICE) --out results/reliability/crashes.json

# A training watched for hours: flat memory, equally long rounds.
HOURS ?= 1
soak: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/reliability/soak.py --hours $(HOURS) --device $(DEVICE) --out results/reliability/soak.json

# A deployment of many nodes on this machine, one of which is killed every other round.
NODES ?= 20
ROUNDS ?= 20
load: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/integration/flower_load.py --nodes $(NODES) --rounds $(ROUNDS) --out results/reliability/load.json

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

check: lint types test

# The site, in build/site; a warning is an error. (The variable hides a note about the theme's future, which is none of this site.)
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: .venv/.installed
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv runs build dist
