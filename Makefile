# tahq: everything runs from .venv, which the first target that needs it creates.
#
#   make demo                      four workers train a model on this machine
#   make check                     what a change must pass
#   make acceptance                the slow tests besides
#   make TORCH_PIP_FLAGS="--index-url https://download.pytorch.org/whl/cpu" demo
#                                  take the small wheel of torch on a machine without a GPU

SHELL           := /bin/bash
PYTHON          ?= python3
VENV            ?= .venv
TORCH_PIP_FLAGS ?=
# More than cores: tests wait a part of their time for processes and networks.
TEST_PROCESSES  ?= $(shell n=$$(( $$(nproc) * 3 / 2 )); echo $$(( n < 8 ? n : 8 )))
TEST_FLAGS      ?= -q
DEMO_NAME       ?= demo-$(shell date +%Y%m%d-%H%M%S)
DEMO_FLAGS      ?=
VM_FLAGS        ?=
CHAOS_FLAGS     ?=
HARDWARE        ?= here

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
CODE  := tahq launch netem tests benchmarks .ci

# Those that need no root, GPU or data; the first lines of the others say how they are run.
IN_BENCH   := assumption coat_states codec demo links optimizer_memory planner qgalore_memory \
              runtime
BENCHMARKS := $(patsubst %,benchmarks/bench_%.py,$(IN_BENCH))

.PHONY: help setup demo test test-parallel test-serial acceptance test-netem-vm check static lint types imports stats \
        docs format bench chaos dist clean
.DEFAULT_GOAL := help

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## create .venv with the pinned versions

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tahq needs Python 3.11 or newer; try: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory debian-venv
	$(PYTHON) -m venv $(VENV)

# Debian leaves ensurepip out of python3: without it `python3 -m venv` cannot install pip.
.PHONY: debian-venv
debian-venv:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3-venv; \
	else \
		echo "python3 has no ensurepip; install it with: sudo apt-get install python3-venv" >&2; exit 2; \
	fi

# pip would compile on one core; some packages hold files that are no Python.
$(READY): constraints.txt pyproject.toml | $(BIN)/python
	$(PIP) install -q --no-compile -c constraints.txt $(TORCH_PIP_FLAGS) torch
	$(PIP) install -q --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	@touch $@

demo: $(READY)  ## train the demo on this machine: four workers, packed wire
	$(BIN)/tahq-launch launch/examples/demo.yaml --set run.name=$(DEMO_NAME) $(DEMO_FLAGS)

# Two calls: tests marked serial measure time or use every core, so nothing runs beside them.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest $(TEST_FLAGS)
PARALLEL = -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# Files with tests marked serial; the others need not be imported.
WITH_SERIAL = $(shell grep -rl --include='test_*.py' 'mark\.serial' tests)

test: LEFT_OUT = and not ci
test: test-parallel test-serial  ## run the quicker part of the tests

test-parallel: $(READY)
	$(PYTEST) $(PARALLEL) -m 'not serial and not acceptance $(LEFT_OUT)'

test-serial: $(READY) test-parallel
	$(PYTEST) -m 'serial and not acceptance $(LEFT_OUT)' $(WITH_SERIAL)

acceptance: $(READY)  ## run the slow tests; result in benchmarks/results/acceptance.txt
	@{ date -I; git rev-parse --short HEAD; uname -srm; nproc; } > benchmarks/results/acceptance.txt
	set -o pipefail; $(PYTEST) $(PARALLEL) -m 'acceptance and not serial' | tee -a benchmarks/results/acceptance.txt
	set -o pipefail; $(PYTEST) -m 'acceptance and serial' $(WITH_SERIAL) | tee -a benchmarks/results/acceptance.txt

test-netem-vm: $(READY)  ## run the kernel backend's tests on a kernel with netem, under qemu
	$(BIN)/python -m vm --result netem/results/kernel_qemu_$(shell date +%Y%m).md $(VM_FLAGS)

check: static test-parallel test-serial  ## format, lint, types, import order, size, tests

static: lint types imports stats

lint: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

stats: $(READY)  ## size of tree and docs against their limits, and phrases to avoid
	$(BIN)/python .ci/stats.py
	$(BIN)/python .ci/prose.py
	$(BIN)/python .ci/words.py

docs: $(READY)  ## build the documentation as a site in site/, and fail on links that lead nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: $(READY)  ## rewrite the code in the house format
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: $(READY)  ## run the benchmarks that need no root, GPU or data, for hours
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script"; done

# Hours, on a machine with nothing else to do, as root; goes on where it was interrupted.
chaos: $(READY)  ## faults in real processes, 20 times each; result in benchmarks/results
	PYTHONPATH=tests:benchmarks $(BIN)/python -m chaos --hardware $(HARDWARE) $(CHAOS_FLAGS)

dist: $(READY)  ## build wheel and sdist into dist/, check them, and train with the wheel
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	.ci/try_wheel $(BIN)/python dist/*.whl

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist site
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
