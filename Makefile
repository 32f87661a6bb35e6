# Everything runs in virtual environments that are made on first use: .venv, and .venv-sanitize for `make sanitize`.

PYTHON ?= python3
WERROR ?= OFF  # ON: a compiler warning in core/ fails the build
SANITIZE_CXX ?= g++
CLANG ?= clang++
SOAK_OPS ?= 1000000
SOAK_SECONDS ?= 3600
EXACT_FIRST ?= 0
EXACT_COUNT ?= 300
# Of vLLM's many dependencies, those that its bench imports.
VLLM_BENCH_NEEDS := aiohttp anthropic blake3 cachetools cbor2 cloudpickle datasets einops 'fastapi>=0.133,<0.137' ijson \
  jsonschema 'llguidance>=1.7,<1.8' mcp msgspec openai openai-harmony oss-harmony pandas partial-json-parser pillow \
  prometheus-client prometheus-fastapi-instrumentator protobuf psutil py-cpuinfo pybase64 python-json-logger pyzmq regex \
  requests sentencepiece setproctitle tiktoken 'transformers>=5.16.1,<5.20' uvloop watchfiles xgrammar==0.2.8
# What exercises the core; pure Python (report, workload, the reference models) has nothing to sanitize.
SANITIZE_TESTS := tests/kv tests/eviction tests/events tests/engines tests/replay tests/router tests/tiers $(filter-out tests/test_package.py tests/test_vllm_model.py,$(wildcard tests/test_*.py))

BIN := .venv/bin
SANITIZE_BIN := .venv-sanitize/bin

# Directories too, so that a deleted file counts as a change.
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE $(shell find core src -type d -o -type f)
CXX_SOURCES := $(shell find core -name '*.[ch]pp')

# Build tools live in the environment (no build isolation), so that a second build compiles only what changed.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# It says all it does (-v), and tools/build.py makes of that how far it is.
PIP_BUILD = -m pip install -v --disable-pip-version-check --no-build-isolation \
  -C cmake.define.UNDERSTUDY_WERROR=$(strip $(WERROR))
BUILD = tools/build.py 'building understudy'

.DELETE_ON_ERROR:
.PHONY: help demo test torch lint conformance exact sanitize clang mutants interop bench fuzz soak clients-ci clients clean

help:
	@echo 'make demo      a bundled workload replayed: a table, and a page in out/demo.html'
	@echo 'make test      the test suite'
	@echo 'make torch     PyTorch for the tests of the real engine, which are skipped without it'
	@echo 'make lint      ruff, mypy --strict, clang-format'
	@echo 'make conformance  every recorded schedule of vLLM, step by step, as a table'
	@echo 'make exact     EXACT_COUNT=$(EXACT_COUNT) new schedules of the real vLLM, recorded and compared (some GB of environments)'
	@echo 'make sanitize  the test suite against a core under ASan and UBSan, and a leak check'
	@echo 'make interop   our events read by Dynamo'"'"'s own router, in an environment of its own'
	@echo 'make clang     the core compiled by clang, warnings as errors (CLANG=clang++-16 names another one)'
	@echo 'make mutants   one-line faults put into the core, each of which a test must notice (one build, then some seconds each)'
	@echo 'make bench     the benchmarks, each against a peer measured in the same run'
	@echo 'make fuzz      the test suite with new random examples (make test draws the same ones every time)'
	@echo 'make soak      the randomised state machines, SOAK_OPS=$(SOAK_OPS) operations, and SOAK_SECONDS=$(SOAK_SECONDS) of scenarios'
	@echo 'make clients-ci  openai and aiperf, unmodified, against a live server'
	@echo 'make clients   the same, vllm bench serve and guidellm too, and their times (some GB of environments)'
	@echo 'make clean     remove environments, builds and caches'

# --- targets ------------------------------------------------------------------------------------------

demo: .venv/installed
	@mkdir -p out
	@$(BIN)/understudy replay examples/demo_trace.jsonl --workers 2 --num-gpu-blocks 1024 --html out/demo.html

test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto

# What the tests of the real engine want; without it they are skipped.
torch: .venv/installed-torch

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

conformance: .venv/installed
	@$(BIN)/understudy conformance vllm tests/golden

# Other ones with EXACT_FIRST=1000.
exact: .venv/installed-dev .venv-vllm/installed
	rm -rf build/exact
	.venv-vllm/bin/python tests/exact/record.py --again tests/golden/vllm-versions/v0.32.0
	.venv-vllm/bin/python tests/exact/record.py build/exact --first $(EXACT_FIRST) --count $(EXACT_COUNT)
	$(BIN)/understudy conformance vllm build/exact

# The interpreter is not built for ASan, so the runtimes are loaded ahead of it. CPython keeps memory until exit:
# leaks are the pure C++ driver's to prove.
sanitize: .venv-sanitize/installed
	build/sanitize/understudy_soak
	LD_PRELOAD="$$(ldd $$(find .venv-sanitize -name '_core*.so') | awk '/lib(asan|ubsan|stdc)/ {print $$3}' | xargs)" \
	  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(SANITIZE_BIN)/python -m pytest -n auto --hypothesis-profile=sanitize $(SANITIZE_TESTS)

# Dynamo has wishes of its own about packages: it sees ours, and ours does not see it.
interop: .venv/installed-dev .venv-interop/installed
	DYN_LOG=error .venv-interop/bin/python -m pytest -p no:cacheprovider tests/interop

# GCC builds what is tested; this says that clang can: 14 is the one that was tried on all of it.
clang: .venv/created
	@command -v $(CLANG) > /dev/null || { echo 'make clang needs $(CLANG) (Debian and Ubuntu: apt-get install clang)'; exit 1; }
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/clang -DCMAKE_CXX_COMPILER=$(CLANG) -DUNDERSTUDY_WERROR=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/clang --target understudy_core --parallel

mutants: .venv/installed-dev
	$(BIN)/python tests/mutants.py

# replay_vs_dynamo.py installs its peer and wants a trace: it is run by hand.
bench: .venv/installed-dev
	$(BIN)/python benchmarks/block_manager.py

# A failure prints the line that reproduces it.
fuzz: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --hypothesis-profile=random -p no:cacheprovider

soak: .venv/installed-dev
	UNDERSTUDY_SOAK_OPS=$(SOAK_OPS) $(BIN)/python -m pytest -n auto -m soak
	$(BIN)/python tests/soak.py --seconds $(SOAK_SECONDS)

# Load generators are heavy, so they live in an environment of their own.
clients-ci: .venv/installed-dev .venv-clients/installed
	$(BIN)/python tests/server/clients.py --short --clients .venv-clients/bin

clients: .venv/installed-dev .venv-clients/installed .venv-vllm/installed .venv-guidellm/installed
	$(BIN)/python tests/server/clients.py --times --clients .venv-clients/bin --vllm .venv-vllm/bin --guidellm .venv-guidellm/bin

clean:
	rm -rf .venv .venv-sanitize .venv-clients .venv-vllm .venv-guidellm .venv-interop build dist out .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- environments -------------------------------------------------------------------------------------

.venv/created .venv-sanitize/created: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Understudy needs Python 3.11 or newer, \
	and $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % v)'
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], \
	  sep="\n")' > $(@D)/build-requires.txt
	@$(@D)/bin/python $(PIP_INSTALL) -r $(@D)/build-requires.txt
	@# CMake and Ninja, where the system has none that will do.
	@$(@D)/bin/python -c 'from scikit_build_core.build import get_requires_for_build_wheel as needs; \
	  print(*needs(), sep="\n")' > $(@D)/build-requires.txt
	@$(@D)/bin/python $(PIP_INSTALL) -r $(@D)/build-requires.txt
	@touch $@

.venv/installed: .venv/created $(SOURCES)
	@echo 'building understudy (a minute or two the first time)'
	@$(BIN)/python $(BUILD) $(BIN)/python $(PIP_BUILD) .
	@touch $@

.venv/installed-dev: .venv/created $(SOURCES)
	@echo 'building understudy (a minute or two the first time)'
	@$(BIN)/python $(BUILD) $(BIN)/python $(PIP_BUILD) '.[dev]'
	@touch .venv/installed $@

.venv-interop/installed: Makefile | .venv/created
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) ai-dynamo-runtime==1.6.1
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
	  "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/ours.pth"
	@touch $@

.venv/installed-torch: .venv/created
	@echo 'installing PyTorch'
	@$(BIN)/python $(PIP_INSTALL) torch==2.13.0
	@$(BIN)/python $(PIP_INSTALL) safetensors transformers triton
	@touch $@

.venv-sanitize/installed: WERROR = ON
.venv-sanitize/installed: .venv-sanitize/created $(SOURCES)
	@echo 'building understudy under ASan and UBSan (a minute or two the first time)'
	@CXX=$(SANITIZE_CXX) $(SANITIZE_BIN)/python $(BUILD) $(SANITIZE_BIN)/python $(PIP_BUILD) -C cmake.define.UNDERSTUDY_SANITIZE=ON \
	  -C build-dir=build/sanitize -C install.strip=false '.[dev]'
	@touch $@

.venv-clients/installed:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) openai 'aiperf==0.13.0'
	@touch $@

.venv-guidellm/installed:
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) torch==2.13.0
	@$(@D)/bin/python $(PIP_INSTALL) guidellm==0.8.1
	@touch $@

# The bench alone: what vLLM wants for GPUs stays out, and what its command line imports comes in.
.venv-vllm/installed:
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) torch==2.13.0
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps vllm==0.32.0
	@$(@D)/bin/python $(PIP_INSTALL) $(VLLM_BENCH_NEEDS)
	@touch $@
