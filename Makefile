# `make demo` and `make test` set up everything they need, on a machine with Python 3.11 or newer and make.
PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3 2>/dev/null))
BIN := .venv/bin

MINUTES ?= 30
STEPS ?= 50000
SEED ?= 0

.PHONY: demo test test-slow parity bench-loader soak fuzz lint clean help
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

demo: .venv/installed   ## the main job: daemon + deepspeed trainer on real media, a few minutes on a CPU
	$(BIN)/python -m deploy.demo.run

test: .venv/installed   ## every test that takes seconds, ten minutes on two cores
	$(BIN)/python -m pytest -m "not slow"

test-slow: .venv/installed   ## the others: whole runs and layouts of several processes, half an hour on two cores
	$(BIN)/python -m pytest -m slow

parity: .venv/installed   ## every layout against one process, as tables of differences, a quarter of an hour
	$(BIN)/python -m tests.bench.parity

soak: .venv/installed   ## 50,000 steps (STEPS=, SEED=) while processes are killed: exactly once, bit for bit, nothing grows
	$(BIN)/python -m tests.bench.soak --steps $(STEPS) --seed $(SEED)

fuzz: .venv/installed   ## damage of every kind against real daemons, 30 minutes (MINUTES=, SEED=)
	$(BIN)/python -m tests.bench.fuzz_loader --minutes $(MINUTES) --seed $(SEED)

bench-loader: .venv/installed   ## the loader beside its peers on two cores, some ten minutes; BENCH=--quick shows that it works
	$(BIN)/python -m tests.bench.loader $(BENCH)

lint: .venv/installed   ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 -e '.[dev]'
	touch $@

clean:           ## remove the environment, the demo's data and its runs
	rm -rf .venv .venv-peers demo-data runs
