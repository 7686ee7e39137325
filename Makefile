# `make` alone lists the targets. PYTHON chooses the interpreter: make test PYTHON=python3.12
# (or PYTHON=python3.12 make test).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One stamp per interpreter: with another one, the environment is made anew.
STAMP := $(VENV)/.installed-$(notdir $(PYTHON))

# One thread per process: pytest runs two processes, and one of them has all distributed tests,
# which start more.
PYTEST_ARGS ?= -n 2
export OMP_NUM_THREADS ?= 1
# Tests start a hundred processes: each would compile our modules anew where none may be kept.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest $(PYTEST_ARGS)

# mkdocs-material prints a page of news in each run.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

LINT = echo "== ruff check" && $(BIN)/ruff check && \
	echo "== ruff format" && $(BIN)/ruff format --check && \
	echo "== mypy" && $(BIN)/mypy && \
	echo "== import-linter" && $(BIN)/lint-imports

.DEFAULT_GOAL := help
.PHONY: help agreement convergence demo bench gpu claims check test test-all test-install planted-faults lint lint-beside-tests docs docs-serve docs-test clean

help: ## list the targets
	@echo "make targets:"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 19

demo: $(STAMP) ## train a small transformer on 2 processes in three ways, and compare (ARGS="--steps 60")
	@$(BIN)/functional-optim demo $(ARGS)

bench: $(VENV)/.installed-bench ## time every executor against its peers (ARGS="--quick", ARGS=--help)
	@$(BIN)/python -m benchmarks $(ARGS)

gpu: $(STAMP) ## on a CUDA device: all tests that need one, and times, into docs/gpu.md (eight minutes)
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

convergence: $(STAMP) ## train each algorithm on five small problems, three seeds each (a quarter of an hour)
	@$(BIN)/python -m benchmarks.training $(ARGS)
	@$(BIN)/python -m docs.generate convergence.md

agreement: $(VENV)/.installed-oracles ## compare each algorithm with other implementations (some minutes)
	@$(BIN)/python -m tests.agreement $(ARGS)

claims: $(STAMP) ## try what papers say of training with few means, in small (ARGS=--write)
	@$(BIN)/python -m benchmarks.claims $(ARGS)

# Types are checked by one process, which leaves a core to the tests.
check: $(STAMP) ## in some minutes: lint, and the tests that need no compiler and no process
	@echo "== pytest -m unit, and lint beside it"
	@{ $(LINT); } >$(VENV)/lint.txt 2>&1 & lint=$$!; failed=0; \
	$(PYTEST) -q -m unit tests || failed=1; \
	wait $$lint || failed=1; cat $(VENV)/lint.txt; exit $$failed

test: lint-beside-tests ## before every merge: lint, then all tests, and the examples in docstrings
	@echo "== pytest: tests, and the examples in docstrings"
	@$(PYTEST) tests --doctest-modules src

# A test has all its cases inside, so it may take long.
test-all: export FUNCTIONAL_OPTIM_TESTS = all
test-all: lint-beside-tests ## for a night: the same, with every combination of options, and many drawn examples
	@echo "== pytest: everything, and other examples in each run"
	@$(PYTEST) --timeout 7200 tests --doctest-modules src

test-install: $(STAMP) ## wheel, sdist, types and README in new environments (downloads torch; ARGS=wheel)
	@$(BIN)/python -m tests.packaging.install $(ARGS)

planted-faults: $(STAMP) ## does a test fail where there is a fault? (ARGS="NAME", ARGS=--check)
	@$(BIN)/python -m tests.planted_faults $(ARGS)

# Strict: a broken link, or a public name that the reference lacks, is an error.
# Not --quiet: mkdocs then counts no warning, and what is broken passes.
docs: $(STAMP) ## build the documentation into site/, and run its notebooks (DOCS_EXECUTE=false: do not)
	@$(MKDOCS) build
	@echo "open site/index.html through a web server: make docs-serve"

docs-serve: $(STAMP) ## show the documentation at http://127.0.0.1:8000, and rebuild what changes
	@DOCS_EXECUTE=$${DOCS_EXECUTE:-false} $(MKDOCS) serve $(ARGS)

docs-test: docs $(VENV)/.installed-browser ## look at every page of site/ in Chromium, on a phone and on a desk
	@$(PYTEST) -n 0 -m browser tests/browser

# One process checks types, which leaves a core idle. Meanwhile pytest compiles the tests, once for
# all its processes; in a new checkout each of them would need 20 seconds for that.
lint-beside-tests: $(STAMP)
	@$(PYTEST) -n 0 -q --collect-only tests >/dev/null 2>&1 & $(LINT); \
	failed=$$?; wait; exit $$failed

lint: $(STAMP) ## style, types, and the direction of imports
	@$(LINT)

clean: ## remove the environment and everything that was generated
	rm -rf $(VENV) build dist runs site src/*.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# Independent implementations, in the same environment.
$(VENV)/.installed-oracles: $(STAMP)
	@echo "== installing the implementations that the table of agreement compares with"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[oracles]"
	@touch $@

# What only the benchmark needs, in the same environment; anew when that is made anew.
$(VENV)/.installed-bench: $(STAMP)
	@echo "== installing the peers that the benchmark compares with"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[bench]"
	@touch $@

# Playwright drives a Chromium that is installed, and brings one where there is none.
$(VENV)/.installed-browser: $(STAMP)
	@echo "== installing what drives a browser"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[browser]"
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  $(BIN)/python -m playwright install --with-deps chromium
	@touch $@

# torch is installed alone and first, at its pinned version: pip is then never tempted to look at
# other versions of it, each some gigabytes with its libraries.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) is not there: install Python 3.11 or later, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or later is needed, and $(PYTHON) is: $$("$(PYTHON)" --version 2>&1)."; \
	  echo "Install a later one, or name it: make PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv or no ensurepip; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@if [ -e "$@" ]; then \
	  echo "== pyproject.toml or constraints.txt changed: updating $(VENV)"; \
	else \
	  echo "== making $(VENV) with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv --clear $(VENV); \
	fi
	@echo "== installing torch (200 MB and more: this takes a while)"
	@$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	@echo "== installing functional-optim and what its tests need"
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[dev]"
	@touch $@
