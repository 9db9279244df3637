# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
# PYTHON=python3.13 makes the environment of that one; without it, of the first that fits.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JARS_READY := $(VENV)/.jars-ready
LOWEST := $(VENV)/lowest
LOCKS := requirements/build.lock requirements/dev.lock
# What pip says is shown only when it fails.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-input
LOG := $(VENV)/setup.log
# Tests mostly wait, so three run at once, each worker with servers of its own. 0: one after the other, in one process;
# so too where the environment names servers, which the workers would share. Files run in the order of their
# names: xdist's own order puts those of few tests last, and some of these are long.
WORKERS ?= $(if $(SIDINGS_POSTGRES)$(SIDINGS_KAFKA),0,3)
TESTS := -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests
# What Python compiles is kept, also where the environment says otherwise, as in many images: tests start hundreds of
# processes, and each would compile all of Sidings again, as pytest would the tests.
export PYTHONDONTWRITEBYTECODE :=
SHOW_LOG := (tail -n 40 $(LOG); exit 1)
COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header --no-emit-options \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host

.DEFAULT_GOAL := help
.PHONY: help setup demo test long lowest chaos lint format model bench profile up down lock clean same

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) $(JARS_READY) ## virtual environment, locked dependencies, Kafka's and Spark's jars (the others do this by themselves)

demo: setup ## the acceptance demo: three instances, kills, takeovers; about a minute
	$(BIN)/python -m examples.transports

test: setup ## all tests but the long ones, on a real Postgres and a real Kafka; WORKERS=0: one after the other
	$(BIN)/python -m pytest $(TESTS) -m "not long and not chaos"

long: setup ## the long tests, which CI runs too: the models, the demo, Spark's, the benchmarks' own
	$(BIN)/python -m pytest $(TESTS) -m long

lowest: setup ## the same with the oldest libraries that pyproject.toml allows, in an environment of their own
	@$(BIN)/python -m venv $(LOWEST)
	@$(BIN)/python .ci/lowest >$(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install --disable-pip-version-check --quiet --constraint $(LOWEST)/constraints.txt \
		--editable '.[cli,dev,devstack,examples,otel,spark,uvloop,web]'
	$(LOWEST)/bin/python -m pytest $(TESTS) -m "not long and not chaos"

chaos: setup ## the longest tests, which kill servers and processes again and again
	$(BIN)/python -m pytest -q -m chaos tests

lint: $(READY) ## style, formatting, strict types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: $(READY) ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(READY) ## the explicit-state models of the protocols, with the bugs that they must catch
	$(BIN)/python docs/model/run.py

bench: setup ## the short benchmarks
	$(BIN)/python -m benchmarks run --short

profile: setup ## where the time of a drain goes
	$(BIN)/python -m benchmarks profile

up: setup ## start Postgres and Kafka; prints SIDINGS_POSTGRES and SIDINGS_KAFKA for your shell
	@$(BIN)/python -m sidings.devstack up

down: $(READY) ## stop them; their data stays
	@$(BIN)/python -m sidings.devstack down

lock: $(READY) ## write requirements/*.lock after pyproject.toml has changed; UPGRADE=--upgrade: all to the newest
	$(COMPILE) $(UPGRADE) --output-file requirements/build.lock requirements/build.in
	$(COMPILE) $(UPGRADE) --all-extras --output-file requirements/dev.lock pyproject.toml

clean: ## stop and delete the servers, delete the virtual environment and all that was generated
	@if [ -x $(BIN)/python ] && [ -d .sidings-devstack ]; then $(BIN)/python -m sidings.devstack down --delete; fi
	@rmdir .sidings-devstack/sessions 2>/dev/null || true
	@if [ -d .sidings-devstack/sessions ]; then echo "Tests run, or were killed: .sidings-devstack stays, by which" \
		"their servers are found."; else rm -rf .sidings-devstack; fi
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# An environment whose making was interrupted has its Python, but no pip: it is completed, or made anew if that fails.
# The build tools come first, from a lock of their own: what is built from source is then built by known versions.
$(READY): $(LOCKS) pyproject.toml | same
	@.ci/prerequisites
	@echo "Setting up $(VENV): about two minutes, once."
	@for how in "" --clear; do $(BIN)/python -m pip --version >/dev/null 2>&1 || \
		"$$(.ci/prerequisites python)" -m venv $$how $(VENV) || test -z "$$how"; done
	@$(INSTALL) --require-hashes -r requirements/build.lock >$(LOG) 2>&1 || $(SHOW_LOG)
	@$(INSTALL) --require-hashes --no-build-isolation -r requirements/dev.lock >>$(LOG) 2>&1 || $(SHOW_LOG)
	@$(INSTALL) --no-deps --no-build-isolation --editable . >>$(LOG) 2>&1 || $(SHOW_LOG)
	@mkdir -p $(VENV)/typing && ln -sfn ../.. $(VENV)/typing/sidings
	@touch $@

same:
	@[ ! -x $(BIN)/python ] || .ci/prerequisites same $(BIN)/python

$(JARS_READY): $(READY) devstack/broker.py devstack/jars.py devstack/prepared.py
	@$(BIN)/python -m sidings.devstack fetch --spark
	@touch $@
