# Everything a developer or CI does, one target each. `make` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rolloutfleet
VENV := .venv
BIN := $(VENV)/bin
RUN := PYTHONPATH=dev $(BIN)/python
TEST := PYTHONPATH=dev $(BIN)/python -m pytest
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-header --no-annotate \
	--no-emit-package rolloutfleet --no-emit-package rolloutfleet-worker $(if $(UPGRADE),--upgrade)
# A uv of one's own is used when there is one; otherwise the pinned one is kept in the cache.
UV_HOME := $(CACHE)/uv-$(shell sed -n 's/^uv==\([^ ]*\).*/\1/p' requirements/bootstrap.in)
export PATH := $(PATH):$(UV_HOME)/bin
export UV_PYTHON_DOWNLOADS := never

# Tests on real engines run beside vLLM's CPU build: an environment that sees it, and holds pytest and our distributions.
ENGINES := build/engines
ENGINES_BIN := $(ENGINES)/bin
ENGINES_SITE := $(ENGINES)/lib/python3.11/site-packages
TORCH_TESTS := $(sort tests/contract/test_client_refit.py tests/unit/client/test_nccl_library.py \
	$(shell grep -rl -e 'importorskip."torch' -e 'importorskip."vllm' --include=*.py tests/unit tests/contract))

step = @printf '\n== %s\n' "$(1)"

.PHONY: help
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9_-]+:.*## / {printf "  make %-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ environment

.PHONY: setup
setup: $(VENV)/.ready ## make .venv with pinned, hashed requirements and our three distributions

$(VENV)/.ready: requirements/dev.txt requirements/bootstrap.txt pyproject.toml client/pyproject.toml worker_image/pyproject.toml
	$(call step,setup: Python environment in $(VENV))
	@uv --version >/dev/null 2>&1 || $(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action ignore \
		--require-hashes --upgrade --target $(UV_HOME) -r requirements/bootstrap.txt
	@test -x $(BIN)/python || uv venv --quiet --python $(PYTHON) $(VENV)
	@VIRTUAL_ENV=$(VENV) uv pip install --quiet --require-hashes -r requirements/dev.txt
	@VIRTUAL_ENV=$(VENV) uv pip install --quiet --no-deps --no-build-isolation -e . -e client -e worker_image
	@touch $@

.PHONY: lock
lock: setup ## write requirements/*.txt anew from pyproject.toml (UPGRADE=1 takes newer releases)
	@$(LOCK) requirements/bootstrap.in -o requirements/bootstrap.txt
	@$(LOCK) pyproject.toml -o requirements/operator.txt
	@$(LOCK) pyproject.toml --group dev -o requirements/dev.txt
	@$(LOCK) dev/requirements/engine-tests.in -o dev/requirements/engine-tests.txt

.PHONY: wheels
wheels: setup ## build our wheels into build/wheels; the Dockerfiles copy them
	@rm -rf build/wheels build/lib build/bdist.*
	@for distribution in . client worker_image; do \
		VIRTUAL_ENV=$(VENV) uv build --quiet --wheel --no-build-isolation --python $(BIN)/python -o build/wheels $$distribution; done
	@rm -rf build/lib build/bdist.* client/build worker_image/build
	@ls build/wheels

.PHONY: clean
clean: ## remove what the targets made here (caches outside the checkout stay)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +

##@ checks

.PHONY: lint
lint: setup ## ruff, mypy, import directions, house rules of the tree
	$(call step,lint: ruff)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	$(call step,lint: mypy)
	@$(BIN)/mypy
	$(call step,lint: import directions)
	@$(BIN)/lint-imports
	$(call step,lint: tree)
	@$(RUN) -m treecheck

.PHONY: format
format: setup ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

.PHONY: generate
generate: setup ## write crds/, the chart's copies and README, and the generated pages of docs/
	@$(RUN) -m generate .

.PHONY: verify
verify: setup ## fail when a generated file or requirements/*.txt is out of date
	$(call step,verify: generated files)
	@$(RUN) -m generate --check .
	$(call step,verify: requirements)
	@rm -rf build/lock && mkdir -p build/lock && cp requirements/*.txt dev/requirements/engine-tests.txt build/lock/
	@$(LOCK) requirements/bootstrap.in -o build/lock/bootstrap.txt
	@$(LOCK) pyproject.toml -o build/lock/operator.txt
	@$(LOCK) pyproject.toml --group dev -o build/lock/dev.txt
	@$(LOCK) dev/requirements/engine-tests.in -o build/lock/engine-tests.txt
	@for path in requirements/{bootstrap,operator,dev}.txt dev/requirements/engine-tests.txt; do diff -u $$path build/lock/$${path##*/} \
		|| { echo "$$path does not follow from pyproject.toml: run make lock"; exit 1; }; done
	@echo "up to date"

##@ tests

.PHONY: test
test: setup ## every tier: unit, contract, engines, chaos, chart, apiserver, cluster
	@rm -rf build/proof
	@$(MAKE) test-unit
	@$(MAKE) test-contract
	@$(MAKE) test-engines
	@$(MAKE) test-chaos
	@$(MAKE) test-chart
	@$(MAKE) test-apiserver
	@$(MAKE) test-cluster
	$(call step,proved by all tiers)
	@$(MAKE) proof

.PHONY: test-unit
test-unit: setup ## pure modules; seconds, no cluster
	$(call step,test: unit)
	@$(TEST) tests/unit dev/tests --proof-tier unit

.PHONY: explore
explore: setup ## every interleaving of the sync job's protocol with faults, deeper than the unit tests (DEPTH=400, SECONDS_EACH=600, ONLY=name)
	$(call step,explore)
	@PYTHONPATH=tests $(BIN)/python -m fakes.explored --depth $(or $(DEPTH),400) --seconds $(or $(SECONDS_EACH),600) \
		$(if $(ONLY),--only "$(ONLY)") --write docs/benchmarks/explore.json

.PHONY: test-contract
test-contract: setup ## the parties over real sockets, engines replaced by small ones
	$(call step,test: contract)
	@$(TEST) tests/contract --proof-tier contract

$(ENGINES)/.ready: $(VENV)/.ready dev/requirements/engine-tests.txt
	$(call step,setup: environment for tests on engines in $(ENGINES))
	@rm -rf $(ENGINES)
	@uv venv --quiet --python $$($(RUN) -m localcluster cpu-env)/bin/python $(ENGINES)
	@VIRTUAL_ENV=$(ENGINES) uv pip install --quiet --require-hashes -r dev/requirements/engine-tests.txt
	@touch $@

# The CPU build lies in the cache under its content's key, so where it is now is written down each time.
.PHONY: engines-env
engines-env: $(ENGINES)/.ready
	@folder=$$($(RUN) -m localcluster cpu-env) && \
		echo "import site; site.addsitedir('$$folder/lib/python3.11/site-packages')" > $(ENGINES_SITE)/cpu-engine.pth
	@VIRTUAL_ENV=$(ENGINES) uv pip install --quiet --no-deps --no-build-isolation -e . -e client -e worker_image

.PHONY: test-engines
test-engines: engines-env ## the launcher with real vLLM on CPUs, the sync job and the client, without a cluster
	$(call step,test: engines)
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(ENGINES_BIN)/python -m pytest tests/engines $(TORCH_TESTS) --proof-tier engines

.PHONY: test-chaos
test-chaos: engines-env ## faults in real processes with networks of their own, judged from outside
	$(call step,test: chaos)
	@$(TEST) tests/chaos --proof-tier chaos

.PHONY: test-chart
test-chart: setup ## the Helm chart, rendered by Helm itself
	$(call step,test: chart)
	@$(RUN) -m localcluster tools
	@$(TEST) tests/chart --proof-tier chart

.PHONY: test-apiserver
test-apiserver: setup ## a real API server with simulated nodes
	$(call step,test: apiserver)
	@$(RUN) -m localcluster tools
	@$(TEST) tests/apiserver --proof-tier apiserver

.PHONY: test-cluster
test-cluster: wheels ## real kubelets, real vLLM on CPUs, real refits
	$(call step,test: cluster)
	@$(TEST) tests/cluster --proof-tier cluster

.PHONY: proof
proof: setup ## rows and scenarios that the last run of each tier proved (ROWS=1 lists the open ones)
	@PYTHONPATH=tests/plugins $(BIN)/python -m proof $(if $(ROWS),--rows)

##@ benchmarks (a GPU; TINY=1 rehearses on CPUs)

BENCHMARKS := refit_colocated refit_dense_7b refit_moe_30b
# Where vLLM for GPUs is installed, BENCH_PYTHON names its interpreter; the rehearsal takes the CPU build.
BENCH_PYTHON ?= $(if $(TINY),$(ENGINES_BIN)/python,python3)

.PHONY: bench-refit_colocated bench-refit_dense_7b bench-refit_moe_30b
bench-refit_colocated: ## trainer and engine on one GPU: refit, pause and serving beside floor and vLLM
bench-refit_dense_7b: ## 15 GB from one GPU to an engine on another
bench-refit_moe_30b: ## 61 GB of experts from one GPU to an engine on another
$(addprefix bench-,$(BENCHMARKS)): $(if $(TINY),engines-env)
	$(call step,$@)
	@HF_HUB_OFFLINE=1 PYTHONPATH=client:operator:worker_image:. $(BENCH_PYTHON) -m benchmarks.$(@:bench-%=%)

# The same on any machine; ENGINES=4,64 ROUNDS=3 rehearse, and leave the result file alone.
.PHONY: bench-fanout
bench-fanout: engines-env ## pause and resume 4, 64 and 256 engines, beside bare calls and calls in turn
	$(call step,$@)
	@OMP_NUM_THREADS=1 PYTHONPATH=client:operator:worker_image:. $(ENGINES_BIN)/python -m benchmarks.fanout

# One core, no GPU; TINY=1 rehearses and leaves the result files alone.
.PHONY: bench-placement
bench-placement: setup ## the planner: seconds, gap to the optimum, engines placed beside other rules
	$(call step,$@)
	@PYTHONPATH=client:operator:. $(BIN)/python -m benchmarks.placement

# Needs no GPU, but root, for namespaces. A bad end makes it fail; `--seed S --run K -v` is one run again.
.PHONY: bench-chaos
bench-chaos: engines-env ## faults put into real parties at every phase: RUNS=200 VLLM_RUNS=12 SEED=1
	$(call step,$@)
	@PYTHONPATH=client:operator:worker_image:dev:. $(BIN)/python -m benchmarks.chaos --runs $(or $(RUNS),200) \
		--vllm-runs $(or $(VLLM_RUNS),12) --seed $(or $(SEED),1) --output docs/benchmarks

.PHONY: bench-chaos-cluster
bench-chaos-cluster: engines-env wheels ## the same in the local cluster, real vLLM, the operator among the victims: RUNS=30 SEED=1
	$(call step,$@)
	@PYTHONPATH=client:operator:worker_image:dev:. $(BIN)/python -m benchmarks.chaos --cluster-runs $(or $(RUNS),30) \
		--seed $(or $(SEED),1) --output docs/benchmarks

##@ a cluster on this machine

.PHONY: images
images: wheels ## build the operator and worker images for the local cluster
	@$(RUN) -m localcluster images

.PHONY: cluster-up
cluster-up: setup ## start a Kubernetes cluster on this machine
	@$(RUN) -m localcluster up

.PHONY: cluster-down
cluster-down: setup ## stop it and remove its state
	@$(RUN) -m localcluster down

.PHONY: demo
demo: wheels ## a fleet of two engines, refitted and asked for text, from nothing
	@$(RUN) -m demo up

.PHONY: demo-down
demo-down: setup ## remove what the demo started
	@$(RUN) -m demo down
