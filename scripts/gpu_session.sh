#!/bin/bash
# A quarter of an hour on a GPU, nothing to install: gpu_session.sh a (420 s), then b (300 s); gpu_session.py says more.
# PYTHON: an interpreter that has torch. Options are those of gpu_session.py: --kernels FOLDER --out FOLDER.
set -euo pipefail

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [[ -z $python && -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
cd "$root"
exec "${python:-python3}" scripts/gpu_session.py "$@"
