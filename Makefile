# Everything runs in .venv, made on first use: only Python >= 3.11, pip and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The tests that need torch run in .venv-frameworks, so that nothing else can come to depend on it.
FRAMEWORKS := .venv-frameworks
# And those of the launchers, which start schedulers, in .venv-launch.
LAUNCH := .venv-launch
# What builds the site of the documents.
DOCS := .venv-docs
# Tests and examples start many processes; without the files of compiled modules each would compile all of ours.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-frameworks test-launch check docs proto bench bench-peers chaos fuzz soak clean

run: $(STAMP)  ## train the digit classifier on a local cluster of 2 parameter servers and 3 workers
	$(BIN)/pscluster run --ps 2 --workers 3 examples/digits.py

# Three files at a time, also on two cores: many tests wait for processes, links and leases. A test that takes too long
# ends its process, and with it the run: a new process would begin the same file again, without end.
test: $(STAMP)  ## run all tests, the longest files first
	$(BIN)/python -m pytest -n 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder --durations 10

test-frameworks: $(FRAMEWORKS)/.installed  ## run the tests with torch, JAX and Keras, which make test leaves out
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks
	$(FRAMEWORKS)/bin/python -m pytest tests/examples tests/docs/test_reference.py -k torch

test-launch: $(LAUNCH)/.installed  ## start jobs on a real Ray, and a real Slurm where its daemons are installed, as root
	$(LAUNCH)/bin/python -m pytest tests/launchers

check: $(STAMP)  ## lint, types, import directions and circles, generated stubs, vulnerabilities in our code and dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_imports.py
	$(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive adapters coordinator core launch ps spmd worker
	$(BIN)/python scripts/audit.py

docs: $(DOCS)/.installed  ## build the site of the documents into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "open site/index.html"

proto: $(STAMP)  ## regenerate the stubs from proto/
	$(BIN)/python scripts/generate_stubs.py

bench: $(STAMP)  ## benchmark against the installed peers, and write docs/benchmarks.md (half an hour)
	$(BIN)/python benchmarks/run.py

chaos: $(STAMP)  ## train while processes are killed, and measure the cost (forty minutes)
	$(BIN)/python benchmarks/chaos.py --faults workers
	$(BIN)/python benchmarks/chaos.py --faults all
	$(BIN)/python benchmarks/chaos_tables.py

fuzz: $(STAMP)  ## fuzz the decoders with a million inputs (a quarter of an hour)
	$(BIN)/python scripts/fuzz.py --inputs 1000000

soak: $(STAMP)  ## train for two hours while processes die, and check that nothing grows: docs/soak.png
	$(BIN)/python benchmarks/soak.py --png docs/soak.png

bench-peers:  ## install TensorFlow, Ray, torch and Dask into .venv-peers, for bench
	$(PYTHON) benchmarks/install_peers.py .venv-peers

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(LAUNCH) $(DOCS) site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pscluster needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(FRAMEWORKS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[frameworks]'
	touch $@

$(LAUNCH)/.installed: pyproject.toml
	$(PYTHON) -m venv $(LAUNCH)
	$(LAUNCH)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[launch]'
	touch $@

$(DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@
