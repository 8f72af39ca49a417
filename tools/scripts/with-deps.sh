#!/usr/bin/env bash
# Runs a command with the dependencies of deps.sh: its Python first on PATH, its ONNX Runtime in ORT_DYLIB_PATH (unless already set).
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=$root/.deps/venv

site=$(ls -d "$venv"/lib/python*/site-packages 2>/dev/null | head -n 1)
[ -n "$site" ] || { echo "with-deps: nothing fetched yet; run tools/scripts/deps.sh test" >&2; exit 3; }

if [ -x "$venv/bin/python" ]; then
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
else
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
if [ -z "${ORT_DYLIB_PATH:-}" ]; then
    ORT_DYLIB_PATH=$(ls "$site"/onnxruntime/capi/libonnxruntime.* 2>/dev/null | head -n 1)
    export ORT_DYLIB_PATH
fi
exec "$@"
