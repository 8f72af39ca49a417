#!/usr/bin/env bash
# Checks the types of the Python module with mypy --strict. hpp.ray is left out: its types come from Ray, which is large and is not installed
# for it. `deps.sh mypy` fetches what it takes.
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=$PWD/.deps/mypy-venv
python=python3
if [ -x "$environment/bin/python" ]; then
    python=$environment/bin/python
else
    PYTHONPATH=$(ls -d "$environment"/lib/python*/site-packages)${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
fi
cd runtime/python
exec "$python" -m mypy --strict --python-version 3.11 --cache-dir ../../.deps/mypy-cache --exclude 'hpp/(_ray_.*|ray)\.py' hpp
