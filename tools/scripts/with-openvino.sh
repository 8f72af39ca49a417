#!/usr/bin/env bash
# Runs a command in an environment in which OpenVINO's plug-in for ONNX Runtime finds a device: the processor.
#
#   tools/scripts/with-openvino.sh tools/scripts/with-deps.sh cargo nextest run -p hpp-end-to-end openvino
#
# The plug-in offers processors of Intel only, but computes on others: there a library stands before it, which says that devices are
# Intel's (runtime/backend/examples/plugin_rig.rs). Sets HPP_OPENVINO_TEST=1, HPP_OPENVINO_LIB, HPP_CACHE and,
# with that library, HPP_PLUGIN_RIG.
# HPP_OPENVINO_PLUGIN names another plug-in than that of deps.sh.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -gt 0 ] || { sed -n '2,10p' "$0" >&2; exit 2; }

plugin=${HPP_OPENVINO_PLUGIN:-$(ls "$root"/.deps/openvino/lib/python*/site-packages/onnxruntime_ep_openvino/libonnxruntime_providers_openvino_plugin.so 2>/dev/null | head -n 1)}
[ -n "$plugin" ] || { echo "with-openvino: OpenVINO's plug-in is missing; run tools/scripts/deps.sh openvino" >&2; exit 3; }

if grep -q GenuineIntel /proc/cpuinfo; then
    export HPP_OPENVINO_LIB=$plugin
else
    (cd "$root" && cargo build --quiet --locked -p hpp-backend --example plugin_rig)
    export HPP_OPENVINO_LIB=${CARGO_TARGET_DIR:-$root/target}/debug/examples/libplugin_rig.so HPP_PLUGIN_RIG=intel=$plugin
fi
export HPP_OPENVINO_TEST=1
# Models that tests compile are not kept in the user's cache.
export HPP_CACHE=${HPP_CACHE:-$root/out/openvino-cache} HPP_CACHE_LIMIT=${HPP_CACHE_LIMIT:-256M}
exec "$@"
