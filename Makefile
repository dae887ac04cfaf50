# `make demo` and `make test` set up a fresh machine by themselves; everything lands in .venv and runs/.
PYTHON ?= python3.11
# STACK=verl: verl's own pins, which GPU users have. STACK=newest: the newest set that was tested (docs/versions.md).
STACK ?= verl
LOCK_verl := requirements-cpu.lock
LOCK_newest := requirements-cpu-newest.lock
VENV_verl := .venv
VENV_newest := .venv-newest
ifndef LOCK_$(STACK)
$(error STACK=$(STACK) is unknown: write STACK=verl or STACK=newest)
endif
VENV ?= $(VENV_$(STACK))
BIN := $(VENV)/bin
# What Ray's C++ waits for, no limit of pytest's ends (pyproject.toml). Limits here are 300 s at most, but for bodies made at
# random: seconds here, 900 s for when SEAMLESS_FUZZ asks for many (make test-clients, without this).
HANGS := -o faulthandler_timeout=330
# WITHOUT: tests that are left out, as pytest's -k names them.
LEFT_OUT = $(if $(WITHOUT),-k "not ($(WITHOUT))")
LOCKS := $(LOCK_$(STACK)) requirements-dev.lock
READY := $(VENV)/.ready
# Other people's clients want other versions than verl: environments of their own.
CLIENTS := .venv-clients
FRAMEWORKS := .venv-frameworks
CREWAI := .venv-crewai
NODE := .venv-node

.DEFAULT_GOAL := help
.PHONY: help install demo test test-newest test-kernel test-edge test-clients test-contract test-lending test-e2e model lint types docs doctor clean

help: ## what can be made
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(READY) ## install what is pinned into .venv (two to five minutes)

demo: $(READY) ## install what is pinned, then run the main job on the CPU (about 15 minutes on two cores)
	$(BIN)/python -m seamless_verl.main +recipe=swe

test: $(READY) ## every check and every test tier (STACK=newest: on the newest set)
	$(MAKE) -j 2 model lint types $(CLIENTS)/.ready
	$(MAKE) test-kernel test-edge test-e2e

# What differs in the two sets is torch, vLLM and transformers, which pure tests do not use: `make test` has those. It has
# vLLM's runner of GPUs (V2), too, on verl's own pins, which GPU users take.
test-newest: ## on the newest set: contracts, one run that lends
	$(MAKE) STACK=newest WITHOUT="GPUs and V2" test-contract test-lending

test-kernel: $(READY) ## pure kernels and configuration: seconds, no torch
	$(BIN)/python -m pytest tests/kernel -q -n 2 --dist worksteal

test-edge: $(READY) $(CLIENTS)/.ready ## proxy over real HTTP, published clients, agents, sandbox, contracts with the installed verl
	SEAMLESS_CLIENTS_PYTHON=$(abspath $(CLIENTS))/bin/python $(BIN)/python -m pytest tests/edge tests/contract -q -n 2 --dist loadfile $(HANGS)

test-clients: $(READY) $(FRAMEWORKS)/.ready $(CREWAI)/.ready $(NODE)/.ready ## published SDKs, agents and frameworks (docs/clients.md); with npm those on Node
	SEAMLESS_CLIENTS_PYTHON=$(abspath $(FRAMEWORKS))/bin/python SEAMLESS_FRAMEWORKS_PYTHON=$(abspath $(FRAMEWORKS))/bin/python \
		SEAMLESS_CREWAI_PYTHON=$(abspath $(CREWAI))/bin/python SEAMLESS_CLIENTS_NODE=$(abspath $(NODE))/node_modules \
		$(BIN)/python -m pytest tests/edge/proxy/test_clients.py tests/edge/proxy/test_frameworks.py \
		tests/edge/proxy/test_fuzz.py -q -n 2

test-contract: $(READY) ## contracts with the installed verl, vLLM and Ray
	$(BIN)/python -m pytest tests/contract -q -n 2 --dist loadfile $(LEFT_OUT) $(HANGS)

test-lending: $(READY) ## one real run in which a slice is lent and reclaimed
	$(BIN)/python -m pytest tests/e2e/test_lending.py -q -k "lent_between_steps$(if $(WITHOUT), and not ($(WITHOUT)))"

test-e2e: $(READY) ## real verl, Ray and vLLM on the CPU
	$(BIN)/python -m pytest tests/e2e -q -n 2 --dist worksteal

model: $(READY) ## build the demo's tiny model and data, which takes one core two minutes the first time
	$(BIN)/python -m seamless_verl.recipes.swe.tiny.assets

lint: $(READY) ## ruff and the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(READY) ## mypy --strict
	$(BIN)/mypy --cache-dir .mypy_cache/$(STACK) seamless_verl recipes

docs: $(READY) ## write docs/configuration.md from the configuration's dataclasses
	$(BIN)/python -m tests.configuration_page

doctor: $(READY) ## check this machine and the installation
	$(BIN)/seamless-verl doctor

clean: ## remove the environments; runs/ stays
	rm -rf $(VENV_verl) $(VENV_newest) $(CLIENTS) $(FRAMEWORKS) $(CREWAI) $(NODE)

$(CLIENTS)/.ready $(FRAMEWORKS)/.ready $(CREWAI)/.ready: .venv-%/.ready: requirements-%.lock
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@echo "installing clients for the tests into .venv-$*"
	.venv-$*/bin/python -m pip install --quiet --no-deps --disable-pip-version-check -r $<
	@touch $@

$(READY): $(LOCKS) setup.cfg pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or name one with make PYTHON=…"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned set (about 200 packages; two minutes on a fast line)"
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --disable-pip-version-check $(addprefix -r ,$(LOCKS))
	-@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib # on all cores, as pip does not
	$(BIN)/python -m pip install --quiet --no-deps --disable-pip-version-check -e .
	@touch $@

$(NODE)/.ready: tests/edge/proxy/clients/package-lock.json
	mkdir -p $(NODE)
	cp tests/edge/proxy/clients/package.json $< $(NODE)
	if command -v npm; then npm install --prefix $(NODE) --ignore-scripts --no-audit --no-fund; else echo "no npm: clients on Node are skipped"; fi
	@touch $@
