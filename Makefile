# Everything here works from a fresh clone with cargo and python3 (with venv or pip); nothing is installed outside the
# folder, but for Chromium, which `make test` takes from Debian where it runs as root and there is none.

TARGET := $(or $(CARGO_TARGET_DIR),target)
DEMO_MODEL ?= fixtures/models/genai/learned-llama-fp32-cpu
DEMO_VRAM ?= 12M
DEMO_PROMPT ?= What does Vec::push do?

SERVE_MODEL ?= fixtures/models/genai/learned-llama-int4-cpu
PORT ?= 8080
SERVE ?=

# 0.9 GB in 4 bits, and a quarter of that; a process may use a little more than the plan, for what the kernel needs of its own.
DISK := out/demo-disk
DISK_SHAPE := --layers 32 --hidden 2048 --intermediate 5632 --heads 32 --kv-heads 8 --vocab 512 --context 2048 --dtype int4
DISK_RAM ?= 216M
DISK_LIMIT ?= 232M

# Where `make install` puts commands, completions and man pages; packagers give DESTDIR too.
PREFIX ?= /usr/local
COMMANDS := hpp-split hpp-profile hpp-exec hpp-fixtures
SHARE = $(DESTDIR)$(PREFIX)/share

.PHONY: help deps demo demo-disk serve install completions shell-files wheel wheel-test test test-ray fuzz kill schemas bench bench-deps bench-llama-cpp clean-deps

help:
	@echo "make demo    fetch ONNX Runtime, build, split a small model, run it"
	@echo "make demo-disk  a model four times larger than the memory it may use: generate, profile, split, run (3 GB of disk)"
	@echo "make serve   fetch ONNX Runtime, build, serve a small model that chats at http://127.0.0.1:8080 (PORT=, SERVE=)"
	@echo "make test    fetch what the tests need, run them all"
	@echo "make test-ray    the tests on a local Ray cluster of two nodes (installs Ray into .deps: 750 MB)"
	@echo "make install PREFIX=DIR  commands, shell completions and man pages (ONNX Runtime comes from pip or ORT_DYLIB_PATH)"
	@echo "make wheel   a Python wheel with the module and the commands, in out/wheels (docs/PYTHON.md)"
	@echo "make wheel-test  the wheel in a new environment without cargo: splits, answers; its size and import time"
	@echo "make completions         shell completions and man pages alone, in out/share"
	@echo "make fuzz    mutated models, plans, templates and more against every reader, MINUTES=10 of it (docs/CAMPAIGNS.md)"
	@echo "make kill    kill -9 against everything that writes, MINUTES=10 of it (docs/CAMPAIGNS.md)"
	@echo "make bench   the measurements of docs/BENCHMARKS.md, as one table: hours, tens of GB of disk; BENCH=NAME for one (tools/bench/bench.py)"
	@echo "make bench-gpu   those that need a GPU: ONNX Runtime with CUDA in ORT_DYLIB_PATH (docs/measurements/README.md)"
	@echo "make bench-llama-cpp   the llama.cpp rows (builds llama-cpp-python and llama-server first)"
	@echo "make schemas rewrite the JSON Schemas from the types, and the types of ONNX files from schemas/onnx.proto"

deps:
	@tools/scripts/deps.sh ort

demo: deps
	cargo build --profile demo --locked -p hpp-split -p hpp-exec
	$(TARGET)/demo/hpp-split $(DEMO_MODEL) --vram $(DEMO_VRAM) --out out/demo --force
	tools/scripts/with-deps.sh $(TARGET)/demo/hpp-exec out/demo/plan.yaml --chat --prompt "$(DEMO_PROMPT)" --max-new 64

# A page to chat on, and OpenAI's API. Conversations are kept in out/serve/kv. SERVE: further arguments.
serve: deps
	cargo build --profile demo --locked -p hpp-split -p hpp-exec
	$(TARGET)/demo/hpp-split $(SERVE_MODEL) --out out/serve/plan --force
	tools/scripts/with-deps.sh $(TARGET)/demo/hpp-exec serve out/serve/plan --port $(PORT) --kv-dir out/serve/kv $(SERVE)

demo-disk: deps
	cargo build --release --locked -p hpp-fixtures -p hpp-profile -p hpp-split -p hpp-exec
	@mkdir -p $(DISK)
	[ -e $(DISK)/model/tokenizer_config.json ] || $(TARGET)/release/hpp-fixtures llama $(DISK_SHAPE) --force $(DISK)/model
	tools/scripts/with-deps.sh $(TARGET)/release/hpp-profile $(DISK)/model --quick --providers cpu --contexts 128 --prefill-tokens 16,128 --out $(DISK)/profile.yaml --force
	$(TARGET)/release/hpp-split $(DISK)/model --profile $(DISK)/profile.yaml --ram $(DISK_RAM) --context 256 --prompt-tokens 16 --new-tokens 32 --out $(DISK)/plan --force
	tools/scripts/with-memory.sh $(DISK_LIMIT) tools/scripts/with-deps.sh $(TARGET)/release/hpp-exec $(DISK)/plan --prompt "$(DEMO_PROMPT)" --max-new 32 --ignore-eos

# Commands that can write their own completions and man pages; make demo compiles without what that takes.
shell-files:
	cargo build --release --locked $(COMMANDS:%=-p %) $(COMMANDS:%=--features %/shell-files)

completions: shell-files
	for command in $(COMMANDS); do $(TARGET)/release/$$command write-shell-files out/share || exit 1; done
	@echo "wrote out/share"

install: shell-files
	install -d $(DESTDIR)$(PREFIX)/bin $(SHARE)/doc/hpp
	install -m 755 $(COMMANDS:%=$(TARGET)/release/%) $(DESTDIR)$(PREFIX)/bin
	install -m 644 README.md LICENSE-APACHE LICENSE-MIT $(SHARE)/doc/hpp
	for command in $(COMMANDS); do $(TARGET)/release/$$command write-shell-files $(SHARE) || exit 1; done
	@echo "installed in $(DESTDIR)$(PREFIX); hpp-exec finds ONNX Runtime through python3 (pip install onnxruntime) or ORT_DYLIB_PATH"

# `pip install .` builds the same. auditwheel says on which Linux systems it runs: those with a glibc as new as the symbols it uses.
wheel:
	@tools/scripts/deps.sh wheel
	@tools/scripts/wheel.sh

wheel-test: wheel
	@python3 tools/scripts/wheel_test.py

test:
	@tools/scripts/deps.sh test
	@tools/scripts/test.sh

# Ray is large, so make test does not install it and skips this test unless it is there.
test-ray: deps
	@tools/scripts/deps.sh ray
	cargo build --locked --workspace --bins
	cargo build --locked -p hpp-python
	HPP_COMMANDS_ARE_BUILT=1 HPP_RAY_PYTHON=$(CURDIR)/.deps/ray-venv/bin/python tools/scripts/with-deps.sh \
		cargo test --locked -p hpp-end-to-end --test python -- --nocapture on_a_ray_cluster

# MINUTES=, SEED=, CASES= (or KILLS=) bound a campaign, ONLY=plan keeps it to one target or writer, and REPLAY=plan:0123456789abcdef
# runs one case again.
MINUTES ?= 10
SEED ?= 1
CAMPAIGN = tools/scripts/with-deps.sh $(TARGET)/campaign/hpp-campaign

.PHONY: campaign-commands
campaign-commands: deps
	cargo build --profile campaign --locked -p hpp-campaigns -p hpp-split -p hpp-exec -p hpp-profile

fuzz: campaign-commands
ifdef REPLAY
	$(CAMPAIGN) replay $(REPLAY)
else
	$(CAMPAIGN) fuzz --minutes $(MINUTES) --seed $(SEED) $(if $(CASES),--cases $(CASES)) $(if $(ONLY),--target $(ONLY))
endif

kill: campaign-commands
	$(CAMPAIGN) kill --minutes $(MINUTES) --seed $(SEED) $(if $(KILLS),--kills $(KILLS)) $(if $(ONLY),--writer $(ONLY))

schemas:
	HPP_UPDATE_SCHEMAS=1 cargo test --locked -p hpp-schema
	HPP_UPDATE_SCHEMAS=1 cargo test --locked -p hpp-onnx --test onnx generated

bench-deps:
	@tools/scripts/deps.sh bench
	@tools/scripts/deps.sh test && tools/scripts/deps.sh vulkan || echo "bench: the streaming rows will say what is missing" >&2

bench: bench-deps
	cargo build --release --locked -p hpp-split -p hpp-profile -p hpp-exec -p hpp-fixtures -p hpp-python
	@tools/scripts/with-deps.sh .deps/bench-venv/bin/python tools/bench/bench.py --target $(TARGET)/release $(BENCH)

# Python packages are not needed, only the library: the one of ORT_DYLIB_PATH, else that of `make deps`, which knows no CUDA.
bench-gpu:
	@[ -n "$$ORT_DYLIB_PATH" ] || tools/scripts/deps.sh ort
	cargo build --release --locked -p hpp-split -p hpp-profile -p hpp-exec -p hpp-fixtures
	@if [ -n "$$ORT_DYLIB_PATH" ]; then python3 tools/bench/gpu.py --target $(TARGET)/release $(BENCH); \
	else tools/scripts/with-deps.sh python3 tools/bench/gpu.py --target $(TARGET)/release $(BENCH); fi

LLAMA_CPP_ROWS := llama-cpp disk-llama-cpp jobs-llama-cpp experts-llama-cpp serving-llama-cpp

bench-llama-cpp: bench-deps
	@tools/scripts/deps.sh llama-cpp
	@tools/scripts/deps.sh llama-server
	cargo build --release --locked -p hpp-split -p hpp-exec -p hpp-fixtures
	@tools/scripts/with-deps.sh .deps/bench-venv/bin/python tools/bench/bench.py --target $(TARGET)/release $(BENCH) $(LLAMA_CPP_ROWS)

clean-deps:
	rm -rf .deps out
