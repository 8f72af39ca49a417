# Everything here works from a fresh clone with cargo and python3 (with venv or pip); nothing is installed outside the
# folder, but for Chromium, which `make test` takes from Debian where it runs as root and there is none.

TARGET := $(or $(CARGO_TARGET_DIR),target)
DEMO_MODEL ?= fixtures/models/genai/llama3-fp32-cpu
DEMO_VRAM ?= 6M
DEMO_PROMPT ?= Once upon a time

.PHONY: help deps demo test schemas bench bench-deps bench-llama-cpp clean-deps

help:
	@echo "make demo    fetch ONNX Runtime, build, split a small model, run it"
	@echo "make test    fetch what the tests need, run them all"
	@echo "make bench   the measurements of the README, as one table (a few GB of disk, half an hour)"
	@echo "make bench-llama-cpp   the llama.cpp rows (builds llama-cpp-python first)"
	@echo "make schemas rewrite the JSON Schemas from the types"

deps:
	@tools/scripts/deps.sh ort

demo: deps
	cargo build --release --locked -p hpp-split -p hpp-exec
	$(TARGET)/release/hpp-split $(DEMO_MODEL) --vram $(DEMO_VRAM) --out out/demo --force
	tools/scripts/with-deps.sh $(TARGET)/release/hpp-exec out/demo/plan.yaml --prompt "$(DEMO_PROMPT)" --max-new 32

test:
	@tools/scripts/deps.sh test
	@tools/scripts/test.sh

schemas:
	HPP_UPDATE_SCHEMAS=1 cargo test --locked -p hpp-schema

bench-deps:
	@tools/scripts/deps.sh bench

bench: bench-deps
	cargo build --release --locked -p hpp-split -p hpp-profile -p hpp-exec -p hpp-fixtures
	@tools/scripts/with-deps.sh .deps/bench-venv/bin/python tools/bench/bench.py --target $(TARGET)/release $(BENCH)

bench-llama-cpp: bench-deps
	@tools/scripts/deps.sh llama-cpp
	cargo build --release --locked -p hpp-split -p hpp-exec -p hpp-fixtures
	@tools/scripts/with-deps.sh .deps/bench-venv/bin/python tools/bench/bench.py --target $(TARGET)/release llama-cpp disk-llama-cpp

clean-deps:
	rm -rf .deps out
