# Everything runs from .venv, which any target makes first: Python 3.11 or newer and make are all it takes.
# On another Python: make PYTHON=python3.12 test. Some tests alone: make pytest PYTEST_ARGS="-k container -x".
# Tests run four files at a time, since much of what they do is wait. Those marked "cluster" start whole jobs and real
# servers, and wait more: make test runs them among the others, which compute meanwhile.

PYTHON ?= python3
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 4
DEMO_ARGS ?=
BENCH_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
SERVERS := .venv/servers/.installed
COMPILED := .venv/.compiled
# What is imported is compiled by whoever imports it first; much of what is installed never is.
PIP := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check --no-compile
PYTEST := $(BIN)/pytest --dist loadfile --no-loadscope-reorder
# Tests that were chosen may all be of one kind; pytest exits with 5 where it finds none.
NONE_IS_FINE := $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])

# DeepSpeed on the CPU, and what it or torch may ever compile kept inside the project: a cache that several
# projects share would hand one project's binary to another.
export DS_ACCELERATOR := cpu
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.torch_extensions
# Tests start hundreds of interpreters: what one has compiled, the next one loads, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# One that a signal ends says where it was.
export PYTHONFAULTHANDLER := 1

.DEFAULT_GOAL := help
.PHONY: help install lowest demo test lint types imports whole pytest cluster servers bench bench-kernels fidelity soak format hooks clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## make .venv, with the versions of constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: TierCheck needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	    "name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@# All versions are pinned: two pips share the work, and the third has nothing to look for and little to install.
	@grep '^[^#]' constraints.txt | awk '{ print > (".venv/pins" NR % 2) }'
	@$(PIP) --no-deps -r .venv/pins0 & $(PIP) --no-deps -r .venv/pins1; code=$$?; wait $$! && exit $$code
	$(PIP) --no-build-isolation -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip check
	@touch $@

lowest: ## the unit tests on the lowest versions that pyproject.toml allows, in .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	@# DeepSpeed's build asks torch for its version.
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e '.[torch]' setuptools~=80.0
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct \
	  --no-build-isolation-package deepspeed -e '.[dev]'
	@# Numba keeps what it compiles beside the sources, and another version of it would have all of that compiled anew.
	NUMBA_CACHE_DIR=$(CURDIR)/.venv-lowest/numba OMP_NUM_THREADS=1 .venv-lowest/bin/pytest -n $(PYTEST_WORKERS) --dist loadfile -p no:cacheprovider tests/unit tests/property $(PYTEST_ARGS)

demo: $(INSTALLED) ## train, kill, recover, and compare bit by bit (DEMO_ARGS="--failure node")
	$(BIN)/tiercheck demo $(DEMO_ARGS)

test: ## everything that must pass: lint, types, import contracts, all tests
	@# npm waits for the network while pip unpacks.
	@$(MAKE) --no-print-directory --jobs=2 install servers
	@$(MAKE) --no-print-directory --jobs=2 lint imports $(COMPILED)
	@# mypy computes on one core, and takes what the tests leave while they wait.
	@$(MAKE) --no-print-directory --jobs=2 types whole

lint: $(INSTALLED) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy, strict
	$(BIN)/mypy
	MYPYPATH=plugins/tiercheck-obstore/src:plugins/tiercheck-transformers/src $(BIN)/mypy plugins/tiercheck-obstore/src plugins/tiercheck-transformers/src plugins/tiercheck-template/sqlite_tier.py plugins/tiercheck-template/keep_progress.py plugins/tiercheck-template/truncated_codec.py

imports: $(INSTALLED) ## who may import whom
	$(BIN)/lint-imports --no-logo

$(SERVERS): tests/servers/package.json
	@mkdir -p $(dir $@)
	@if command -v npm >/dev/null; then cp tests/servers/package.json $(dir $@) \
	  && npm install --prefix $(dir $@) --silent --no-audit --no-fund --ignore-scripts \
	    --fetch-retries=1 --fetch-timeout=60000 && touch $@; \
	else echo "npm is not installed: the tests against Azurite will be skipped"; fi

servers: $(SERVERS) ## the servers that npm brings, for the tests that talk to them

$(COMPILED): $(INSTALLED) tests/warm_up.py $(wildcard tiercheck/kernels/cpu/*.py tiercheck/kernels/cpu/*/*.py)
	$(BIN)/python -m tests.warm_up
	@touch $@

whole: $(COMPILED) $(SERVERS)
	OMP_NUM_THREADS=1 $(PYTEST) -n $(PYTEST_WORKERS) $(PYTEST_ARGS) $(NONE_IS_FINE)

pytest: $(COMPILED) ## the tests that need no server and no whole job (PYTEST_ARGS="-k shm -x")
	@# Ranks are threads there: each would have torch compute on two threads, which wait for each other.
	OMP_NUM_THREADS=1 $(PYTEST) -n $(PYTEST_WORKERS) --ignore=tests/cluster -m "not cluster" $(PYTEST_ARGS) $(NONE_IS_FINE)

cluster: $(COMPILED) $(SERVERS) ## the other tests: whole jobs, real servers, plug-ins installed from wheels
	$(PYTEST) -n $(PYTEST_WORKERS) -o testpaths="tests/cluster tests/plugins" -m cluster $(PYTEST_ARGS) $(NONE_IS_FINE)

bench: $(INSTALLED) ## the tiers against this machine's ceilings (BENCH_ARGS="--only 'shm.*' --json")
	$(BIN)/python -m benchmarks tiers $(BENCH_ARGS)

bench-kernels: $(INSTALLED) ## what encodes and replays, against this machine's ceilings
	$(BIN)/python -m benchmarks kernels $(BENCH_ARGS)

fidelity: $(INSTALLED) ## what each codec is worth: half an hour of training (BENCH_ARGS=--quick)
	$(BIN)/python -m benchmarks fidelity $(BENCH_ARGS)

soak: $(INSTALLED) ## half an hour of races under faults on every driver
	$(BIN)/python -m benchmarks soak --minutes 30

format: $(INSTALLED) ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(INSTALLED) ## run the checks before each git commit
	$(BIN)/pre-commit install

clean: ## remove .venv, caches and outputs
	rm -rf .venv .venv-lowest .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	rm -rf .torch_extensions demo-output build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
