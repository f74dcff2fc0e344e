# `make demo` and `make test` are all a fresh machine needs: each makes the environment it runs in.
PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
# Tests of the package itself, without notebooks and without the TPU compiler: what is repeated on another Python.
# Nor what knows nothing of JAX's versions: readers of data, the scheduler, the planner's solver, what the package's own source is held to, figures of benchmarks, pages of the docs, the launcher's
# own tests (what it is to JAX, test_initialize.py tries) and the faults, which are those of processes and files. Nor `one_version`,
# and of a test with many parameters the first alone: one of each kind calls the same functions of JAX as the others do.
CORE_SUITE := -m "not slow and not gpu and not network and not tpu_aot and not gpu_aot and not one_version" --ignore=tests/notebooks --ignore=tests/data --ignore=tests/schedule --ignore=tests/search --ignore=tests/faults --ignore=tests/benchmarks --ignore=tests/typing \
	--ignore=tests/runtime/launch/test_launch.py --ignore=tests/runtime/launch/test_elastic.py --ignore=tests/runtime/launch/test_kept_memory.py --ignore=tests/runtime/checkpoint/test_checkpoint_page.py --ignore=tests/test_docs.py --ignore=tests/test_site.py --ignore=tests/docs --ignore=tests/release \
	--ignore=tests/test_rooms.py --ignore=tests/test_signatures.py --ignore=tests/test_refusals.py
# One file's tests run in one process, which shares what their fixtures compile. The order is the folders': the short ones are last, so that no process
# is left alone with a long one. A process that dies ends the run: one in its place can be left without work, waiting for ever.
IN_PROCESSES = --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
MARKED := $(VENV)/.installed
# Every process that tests start would otherwise compile the package's source anew, and each of pytest's all of the tests'.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-core test-slow test-gpu-aot lint docs dist notebooks mutants clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo 'variables: PYTHON=$(PYTHON) VENV=$(VENV) JOBS=$(JOBS) DEMO_ARGS= PYTEST_ARGS= MUTANTS_ARGS='

demo: $(MARKED)-demo ## train a VGG on 8 virtual devices on this machine
	$(BIN)/splitjax demo $(DEMO_ARGS)

install-%: $(MARKED)-%
	@:

test: $(MARKED)-test ## run all tests that need no accelerator
	$(BIN)/python -m pytest $(IN_PROCESSES) $(PYTEST_ARGS)

test-core: $(MARKED)-test-core ## run the tests of the package alone
	SPLITJAX_TEST_OPTIMISED=1 SPLITJAX_TEST_ONE_OF_EACH=1 $(BIN)/python -m pytest $(IN_PROCESSES) $(CORE_SUITE) $(PYTEST_ARGS)

test-slow: $(MARKED)-test ## run the tests marked slow
	$(BIN)/python -m pytest -m "slow and not gpu and not network" $(PYTEST_ARGS)

test-gpu-aot: $(MARKED)-test,gpu ## compile the GPU kernels for an H200 (downloads 4 GB, needs no GPU)
	$(BIN)/python -m pytest $(IN_PROCESSES) -m gpu_aot $(PYTEST_ARGS)

lint: $(MARKED)-test ## check style, formatting and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python tests/typing/check_package.py

mutants: $(MARKED)-test ## change one line of the package at a time: each time a test has to fail (a few minutes on two cores)
	$(BIN)/python -m benchmarks mutants --jobs $(JOBS) $(MUTANTS_ARGS)

docs: $(MARKED)-docs ## build the site into docs/_build/html, without a warning
	$(BIN)/python -m sphinx -b html -W --keep-going -q -c docs -d docs/_build/doctrees . docs/_build/html
	@echo 'site: docs/_build/html/index.html'

dist: $(MARKED)-dist ## build wheel and sdist, and try both in clean environments
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/release/check_dist.py dist

notebooks: $(MARKED)-test ## write the notebooks anew from their paired scripts, and run them (minutes)
	$(BIN)/python -m jupytext --to ipynb --update notebooks/*.py
	$(BIN)/python -m tests.notebooks.execute

clean: ## remove the environments and what the tools cached
	rm -rf .venv .venv-newer build dist docs/_build .pytest_cache .hypothesis .ruff_cache

# One mark per set of extras, younger than pyproject.toml once installed: a second `make` goes straight to work.
$(MARKED)-%: pyproject.toml $(MARKED)-nothing
	@echo 'installing splitjax[$*] into $(VENV) ...'
	@$(BIN)/python -m pip install --disable-pip-version-check -qq --editable '.[$*]'
	@touch $@

$(MARKED)-nothing:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "splitjax needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make $(MAKECMDGOALS) PYTHON=python3.12"; \
		exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "$(PYTHON) cannot make a virtual environment; Debian and Ubuntu need the package python3-venv"; exit 1; }
	@touch $@
