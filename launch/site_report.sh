#!/bin/bash
# One archive that says what a cluster does with this project (docs/performance.md), as a job or by hand:
# sbatch -N 2 --ntasks-per-node=1 --gpus-per-node=8 -t 2:00:00 launch/site_report.sh [--short] [--cluster clusters/NAME]
# Every node and the network between nodes are checked by srun; kernels, layouts and speed are measured on the first. What
# does not fit into the time of the job is left out. PYTHON: the interpreter.
#SBATCH --job-name=site-report
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:TERM@30
set -euo pipefail

root=${SLURM_SUBMIT_DIR:-}
if [[ ! -f $root/scripts/site_report.py ]]; then
  root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fi
if [[ ! -f $root/scripts/site_report.py ]]; then
  echo "error: submit this from the checkout of megatron_port" >&2
  exit 3
fi
python=${PYTHON:-}
if [[ -z $python && -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
cd "$root"
exec "${python:-python3}" scripts/site_report.py "$@"
