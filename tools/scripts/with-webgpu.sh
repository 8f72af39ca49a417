#!/usr/bin/env bash
# Runs a command in an environment in which ONNX Runtime's WebGPU plugin finds a device: software Vulkan, presented as a GPU.
#
#   tools/scripts/with-webgpu.sh cargo nextest run -p hpp-backend
#
# Sets HPP_WEBGPU_TEST=1, HPP_WEBGPU_PLUGIN, VK_DRIVER_FILES, XDG_RUNTIME_DIR and LD_LIBRARY_PATH. ONNX Runtime searches
# for GPUs in /sys/class/drm, so a private mount namespace adds one there; the machine itself is not changed.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -gt 0 ] || { sed -n '2,7p' "$0" >&2; exit 2; }

plugin=$(ls "$root"/.deps/venv/lib/python*/site-packages/onnxruntime_ep_webgpu/libonnxruntime_providers_webgpu.so 2>/dev/null | head -n 1)
[ -n "$plugin" ] || { echo "with-webgpu: the WebGPU plugin is missing; run tools/scripts/deps.sh test" >&2; exit 3; }
export HPP_WEBGPU_TEST=1 HPP_WEBGPU_PLUGIN=$plugin

[ -e "$root/.deps/vulkan/icd.json" ] || { echo "with-webgpu: software Vulkan is missing; run tools/scripts/deps.sh vulkan" >&2; exit 3; }
export VK_DRIVER_FILES=$root/.deps/vulkan/icd.json VK_ICD_FILENAMES=$root/.deps/vulkan/icd.json
export LD_LIBRARY_PATH=$root/.deps/vulkan${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-$root/.deps/vulkan/runtime}
mkdir -p -m 700 "$XDG_RUNTIME_DIR"

namespace=(unshare --mount)
[ "$(id -u)" = 0 ] || namespace=(unshare --map-root-user --mount)
exec "${namespace[@]}" bash -c '
    set -e
    mount -t tmpfs tmpfs /sys/class
    gpu=/sys/class/pci/0000:00:01.0
    mkdir -p "$gpu" /sys/class/drm/card0
    ln -s "$gpu" /sys/class/drm/card0/device
    echo 0x1af4 >"$gpu/vendor"
    echo 0x1050 >"$gpu/device"
    echo 0x030000 >"$gpu/class"
    exec "$@"' with-webgpu "$@"
