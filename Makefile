# Each target does all of its own set-up: a virtual environment, then pip.
# Nothing else needs to be on the machine but Python and make.
#
#   PY=python3.12          another interpreter
#   TORCH=torch==2.14.1    another torch (default: the line in constraints.txt)
#   TORCH=system           the torch that the interpreter already has
#   VENV=/path             another place for the environment; one that exists is reused

PY ?= python3
VENV ?= .venv
PINNED_TORCH := $(shell cat constraints.txt)
TORCH ?= $(PINNED_TORCH)
BIN := $(VENV)/bin
# Twice two cores: many tests wait for a process, a deadline or a disk.
JOBS ?= 4

ifeq ($(TORCH),system)
  VENV_FLAGS := --system-site-packages
  PIP_TORCH :=
else
  VENV_FLAGS :=
  # Named exactly, torch comes as the build that this machine has; a range would fetch gigabytes.
  PIP_TORCH := "$(TORCH)"
  ifeq ($(TORCH),$(PINNED_TORCH))
    PIP_TORCH := -c constraints.txt $(PIP_TORCH)
  endif
endif

EXTRAS_demo := .
EXTRAS_test := .[test,data,tensorboard]
# mypy says other things where an optional package is missing: lint and test see the same ones.
EXTRAS_lint := .[lint,test,data,tensorboard]
EXTRAS_docs := .[docs]

.PHONY: help demo test test-slow test-ranks test-gpu faults lint docs bench audit-mutants doctor-score clean
.NOTPARALLEL:
.SECONDARY:

help:
	@echo "make demo      train the small GPT on Python's own source, then sample from it"
	@echo "make test      the whole test suite (CPU)"
	@echo "make lint      ruff, mypy, and the pages without a warning"
	@echo "make docs      build the pages in docs/ into site/"
	@echo "make bench     host time of an update against a bare loop"
	@echo "make doctor-score  how often the doctor is right: on runs its thresholds were tuned on, and on held-out ones"
	@echo "make test-slow   further cases that each need processes of their own (CPU)"
	@echo "make audit-mutants  clean scripts, broken mechanically: how many the audit finds"
	@echo "make test-ranks  every layout and launch of several ranks (CPU)"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make clean     remove the environment and the caches; runs/ stays"

# One stamp a set of extras, built again when what it was built from changes.
$(VENV)/.ready-%: pyproject.toml constraints.txt Makefile
	@test -x $(BIN)/python || $(PY) -m venv $(VENV_FLAGS) $(VENV)
	@echo "setting up $(VENV) for $* ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_TORCH) -e "$(EXTRAS_$*)"
	@touch $@

# A thread that waits for another spins. Where something else runs on the same cores, that holds
# up the one it waits for: a short spin trains several times faster there, and as fast elsewhere.
demo: $(VENV)/.ready-demo
	GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-10000} $(BIN)/surefoot train

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not gpu and not ranks_full and not slow"

# Scripts under audit in processes of their own: every framework, recipe and way to end.
test-slow: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -n $(JOBS) -m "slow and not gpu"

lint: $(VENV)/.ready-lint docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.ready-docs
	$(BIN)/zensical build --clean --strict

bench: $(VENV)/.ready-demo
	$(BIN)/python benchmarks/host_overhead.py

audit-mutants: $(VENV)/.ready-test
	$(BIN)/python tests/sanitizer_zoo/mutants/score.py

doctor-score: $(VENV)/.ready-test
	$(BIN)/python tests/diagnosis/score.py

# N=2000 tries each random fault so often; without it, as often as is stated for a release.
N ?= stated
faults: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -n $(JOBS) -m faults_full --faults-n $(N) --timeout 7200 tests/faults

test-ranks: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -m "not gpu" tests/parallel tests/memory tests/verify

test-gpu: $(VENV)/.ready-test
	$(BIN)/python -m pytest -q -m gpu

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
