#!/usr/bin/env bash
# Builds the Python wheel into out/wheels, and says on which Linux systems it runs. `deps.sh wheel` fetches what it takes.
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=.deps/wheel-venv
python=python3
if [ -x "$environment/bin/python" ]; then
    python=$environment/bin/python
else
    PYTHONPATH=$(ls -d "$environment"/lib/python*/site-packages)${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
fi
rm -rf out/wheels
"$python" -m pip wheel --disable-pip-version-check --no-deps --wheel-dir out/wheels .
if [ "$(uname -s)" = Linux ]; then
    "$python" -m auditwheel show out/wheels/*.whl
fi
