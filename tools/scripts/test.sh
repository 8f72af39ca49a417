#!/usr/bin/env bash
# Runs the whole test suite, including the tests on a WebGPU device, on OpenVINO and in a browser if these are available. With CI=true a
# missing one is an error; OpenVINO's plug-in may be missing where PyPI has none for the system.
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts=tools/scripts

runner=(cargo test --workspace --locked --no-fail-fast)
if cargo nextest --version >/dev/null 2>&1; then
    runner=(cargo nextest run --config-file tools/nextest.toml --workspace --locked --no-fail-fast)
else
    echo "test: cargo-nextest is not installed; using cargo test" >&2
fi

# Checks for a working device, not only for its files.
probe='
import os, sys, onnxruntime as ort
ort.register_execution_provider_library("webgpu", os.environ["HPP_WEBGPU_PLUGIN"])
sys.exit(not any(d.ep_name == "WebGpuExecutionProvider" for d in ort.get_ep_devices()))'

device=()
if $scripts/deps.sh vulkan && $scripts/with-webgpu.sh $scripts/with-deps.sh python3 -c "$probe"; then
    device=($scripts/with-webgpu.sh)
elif [ "${CI:-}" = true ]; then
    echo "test: no WebGPU device, and CI requires one" >&2
    exit 1
else
    echo "test: SKIPPED the tests that need a WebGPU device (tools/scripts/with-webgpu.sh says why above)" >&2
fi

probe='
import os, sys, onnxruntime as ort
ort.register_execution_provider_library("openvino", os.environ["HPP_OPENVINO_LIB"])
sys.exit(not any(d.ep_name == "OpenVINOExecutionProvider" for d in ort.get_ep_devices()))'

openvino=()
if ! $scripts/deps.sh openvino; then
    echo "test: SKIPPED the tests of OpenVINO: its plug-in cannot be installed here" >&2
elif $scripts/with-openvino.sh $scripts/with-deps.sh python3 -c "$probe"; then
    openvino=($scripts/with-openvino.sh)
elif [ "${CI:-}" = true ]; then
    echo "test: OpenVINO's plug-in is installed and offers no device, and CI requires one" >&2
    exit 1
else
    echo "test: SKIPPED the tests of OpenVINO: its plug-in offers no device on this processor" >&2
fi
if [ "${CI:-}" = true ]; then
    # Of what was found above, no test may be skipped.
    [ ${#device[@]} = 0 ] || export HPP_WEBGPU_REQUIRED=1
    [ ${#openvino[@]} = 0 ] || export HPP_OPENVINO_REQUIRED=1
fi

if chromium=$($scripts/deps.sh chromium); then
    export HPP_CHROMIUM=$chromium
elif [ "${CI:-}" = true ]; then
    echo "test: no Chromium, and CI requires it" >&2
    exit 1
else
    echo "test: SKIPPED the tests that open pages in a browser (tools/scripts/deps.sh chromium says why above)" >&2
fi

if [ -x .deps/ray-venv/bin/python ]; then
    export HPP_RAY_PYTHON=$PWD/.deps/ray-venv/bin/python
else
    echo "test: SKIPPED the test on a Ray cluster (make test-ray installs Ray and runs it)" >&2
fi

python3 -m unittest discover -q -s tools/bench
$scripts/deps.sh mypy
$scripts/mypy.sh
cargo build --workspace --locked --bins
cargo build --locked -p hpp-python
cargo test --workspace --locked --no-run
export HPP_COMMANDS_ARE_BUILT=1
exec "${openvino[@]}" "${device[@]}" $scripts/with-deps.sh "${runner[@]}" "$@"
