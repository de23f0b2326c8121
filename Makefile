# Everything runs in .venv, made on first use: nothing but Python >= 3.11, pip and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test check proto bench bench-peers chaos fuzz soak clean

run: $(STAMP)  ## train the digit classifier on a local cluster of 2 parameter servers and 3 workers
	$(BIN)/pscluster run --ps 2 --workers 3 examples/digits.py

test: $(STAMP)  ## all of them, two files at a time, the longest first
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(STAMP)  ## lint, types, directions and circles of imports, fresh stubs, weaknesses: ours, and known ones of what we use
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_imports.py
	$(BIN)/python scripts/generate_stubs.py --check
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive coordinator core ps worker
	$(BIN)/python scripts/audit.py

proto: $(STAMP)  ## generate the stubs anew from proto/
	$(BIN)/python scripts/generate_stubs.py

bench: $(STAMP)  ## measure beside the peers that are installed, and write docs/benchmarks.md (half an hour)
	$(BIN)/python benchmarks/run.py

chaos: $(STAMP)  ## train while faults strike, and say what it cost (forty minutes)
	$(BIN)/python benchmarks/chaos.py --faults workers
	$(BIN)/python benchmarks/chaos.py --faults all

fuzz: $(STAMP)  ## a million inputs for the decoders (a quarter of an hour)
	$(BIN)/python scripts/fuzz.py --inputs 1000000

soak: $(STAMP)  ## train for two hours while processes die, and see whether anything grows: docs/soak.png
	$(BIN)/python benchmarks/soak.py --png docs/soak.png

bench-peers:  ## install TensorFlow, Ray, torch and Dask into .venv-peers, for bench
	$(PYTHON) benchmarks/install_peers.py .venv-peers

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pscluster needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@
