# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
ARGS ?=
LANES ?= 4
PARALLEL = -n $(LANES) --dist loadfile --no-loadscope-reorder
# Words in ARGS that select tests. If there are any, exactly these tests run, including those that the target leaves out.
NAMED = $(filter tests% -k% -m% --lf --last-failed,$(ARGS))
# The test files with integrations, the slowest ones first.
INTEGRATIONS = $(patsubst %,tests/e2e/test_%.py,until_decided slurm ray transformers trackers transformers_versions) $(shell grep -rl --include='test_*.py' mark.integration tests)
LOWEST := .venv-lowest
NEWEST := .venv-newest
BUILD := .venv-build
EMPTY := .venv-empty
# A short run, which make smoke and make dist repeat.
SMOKE := experiment=demo data.truncate=0.05 run.root=build run.name=smoke
CASES ?= 10000
SEED ?= $(shell date +%Y%m%d)
PYTHON_VERSION ?= 3.12
DIR ?= wheels
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
# Let Python compile each module at its first import. pip would spend half a minute to compile all of them.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test test-rest test-all test-integrations test-slow check fuzz coverage mutation lowest newest smoke dist wheels lines site docs clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 28

train: $(VENV)/.train  ## set up .venv, train the demo on RANKS=2 local processes, show its loss and a sample
	@$(BIN)/python main.py experiment=demo ddp.nproc_per_node=$(RANKS) $(ARGS)
	@echo
	@echo 'next, after `. $(BIN)/activate`:'
	@echo '  python sample.py outputs/demo prompt="The " max_new_tokens=500    # more text'
	@echo '  python main.py experiment=demo run.name=mine data.path=my.txt ddp.nproc_per_node=$(RANKS)    # train on your own text'
	@echo '  tensorboard --logdir outputs                                      # curves of loss and speed'

test: $(VENV)/.test  ## set up .venv and test every promise once; LANES=4 test files run in parallel, ARGS are passed to pytest
	@$(BIN)/python -m pytest $(PARALLEL) $(if $(NAMED),,-m core tests/fake_gpu tests/contract tests/unit) $(ARGS)
	@$(if $(NAMED),,echo '`make test-rest` runs all other tests: several ranks, every command, faults of network, disk and S3, the rest of the contract, fuzz')

test-rest: $(VENV)/.test  ## run the tests that make test leaves out: several processes, all commands, faults
	@$(BIN)/python -m pytest $(PARALLEL) $(if $(NAMED),,-m "not core") $(ARGS)

test-all: $(VENV)/.test  ## run the tests of make test and make test-rest together
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-integrations: $(VENV)/.integrations  ## test with transformers, ONNX, trackers, Jupyter, Chromium, SLURM, Ray and Kubeflow's models
	@$(BIN)/python -m pytest -m integration $(PARALLEL) $(ARGS) $(INTEGRATIONS)

test-slow: $(VENV)/.test  ## run the longest tests: random faults, further cases of a path, installation of the extras
	@$(BIN)/python -m pytest -m slow -n 2 --dist loadfile $(ARGS)

check: $(VENV)/.dev  ## check format, lint and types, and run the unit tests of changed folders and of those that import them
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff format --check --isolated --line-length 120 tests/contract
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@tests=$$($(BIN)/python scripts/changed_rooms.py) && \
	  if [ -n "$$tests" ]; then $(BIN)/python -m pytest $$tests; else echo 'no folder with unit tests has changed'; fi

fuzz: $(VENV)/.test  ## run CASES=10000 commands with hostile values and files, drawn with SEED=20300101 (default: today's date)
	@FUZZ_CASES=$(CASES) FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -n $(LANES) --dist load $(ARGS) tests/fuzz

coverage: $(VENV)/.test  ## measure the branch coverage of the package over all tests, including worker processes
	@rm -f .coverage .coverage.*
	@$(BIN)/python -m coverage run -m pytest $(ARGS)
	@$(BIN)/python -m coverage combine -q 2>/dev/null || true  # killed processes leave broken files
	@$(BIN)/python -m coverage report

mutation: $(VENV)/.dev  ## change the code in 120 places, one at a time, and see whether a test fails (an hour); ARGS go to scripts/mutation.py
	@$(BIN)/python scripts/mutation.py $(ARGS)

lowest:  ## run unit and contract tests with the lowest versions in setup.cfg; torch is from constraints.txt, or TORCH=2.9.0
	@rm -rf $(LOWEST)
	@$(PYTHON) -m venv $(LOWEST)
	@$(PYTHON) scripts/lowest_versions.py test >$(LOWEST)/constraints.txt
	@echo 'torch==$(TORCH)' >>$(LOWEST)/constraints.txt
	@echo "installing the lowest versions, and torch $(TORCH), into $(LOWEST)"
	@$(LOWEST)/bin/python $(PIP_INSTALL) -c $(LOWEST)/constraints.txt -e '.[test]'
	@$(LOWEST)/bin/python -m pytest $(PARALLEL) tests/unit tests/contract $(ARGS)

newest:  ## run unit and contract tests with the newest of everything, and release candidates of Hydra and OmegaConf
	@rm -rf $(NEWEST)
	@$(PYTHON) -m venv $(NEWEST)
	@sed -nE 's/^ +((hydra-core|omegaconf)>=.*)/\1/p' setup.cfg >$(NEWEST)/candidates.txt
	@echo 'installing the newest versions into $(NEWEST)'
	@$(NEWEST)/bin/python $(PIP_INSTALL) --pre --no-deps -r $(NEWEST)/candidates.txt
	@$(NEWEST)/bin/python $(PIP_INSTALL) -e '.[test]'
	@$(NEWEST)/bin/python -m pip list --disable-pip-version-check | grep -E '^(hydra-core|omegaconf|torch|numpy) '
	@$(NEWEST)/bin/python -m pytest $(PARALLEL) tests/unit tests/contract $(ARGS)

smoke: $(VENV)/.train  ## train ten steps in one process, then ten more, which must resume
	@rm -rf build/smoke
	@$(BIN)/python main.py $(SMOKE) trainer.max_steps=10
	@$(BIN)/python main.py $(SMOKE) trainer.max_steps=20
	@grep -q 'resuming from the snapshot of step 10 of 20' build/smoke/main.rank0.log

dist:  ## build the wheel and the sdist into dist/, check them, and train with the wheel in an empty environment
	@rm -rf $(BUILD) $(EMPTY) build/empty dist
	@$(PYTHON) -m venv $(BUILD)
	@$(BUILD)/bin/python $(PIP_INSTALL) -c constraints.txt build twine
	@$(BUILD)/bin/python -m build
	@$(BUILD)/bin/python -m twine check --strict dist/*
	@$(PYTHON) -m venv $(EMPTY)
	@$(EMPTY)/bin/python $(PIP_INSTALL) dist/*.whl
	@mkdir -p build/empty
	@cd build/empty && ../../$(EMPTY)/bin/mingpt-ddp train $(SMOKE) trainer.max_steps=10

wheels:  ## download the wheels for a machine with torch, PYTHON_VERSION=3.12 and no network into DIR=wheels
	@$(PYTHON) scripts/download_wheels.py --python-version $(PYTHON_VERSION) $(DIR)

lines:  ## count the package's tokens and lines of code, without blank lines, comments and docstrings
	@$(PYTHON) scripts/count_lines.py

site: $(VENV)/.docs  ## build the documentation into build/site; a dead link or anchor fails
	@$(BIN)/python scripts/site_pages.py
	@$(BIN)/zensical build --clean --strict

docs: $(VENV)/.docs  ## serve the documentation on http://localhost:8000, as of now
	@$(BIN)/python scripts/site_pages.py
	@$(BIN)/zensical serve

clean:  ## remove .venv and the caches of tools; runs and data stay
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(BUILD) $(EMPTY) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* *.egg-info build dist

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: Python 3.10 or newer is needed, but $(PYTHON) is `$(PYTHON) -V 2>&1`; use make PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.train: EXTRAS :=
$(VENV)/.test: EXTRAS := [test]
$(VENV)/.integrations: EXTRAS := [integrations]
$(VENV)/.docs: EXTRAS := [docs]
$(VENV)/.dev: EXTRAS := [dev]
$(VENV)/.train $(VENV)/.test $(VENV)/.integrations $(VENV)/.docs $(VENV)/.dev: setup.cfg constraints.txt | $(VENV)/bin/pip
	@echo "installing into $(VENV) (once)"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.$(EXTRAS)'
	@touch $@
