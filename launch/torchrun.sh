#!/bin/bash
# One node without SLURM: launch/torchrun.sh run.toml [--nproc N] [--set a.b=value …]
# One process per GPU (or --nproc of them), started by torchrun; everything else goes to `megatron-port train`.
set -euo pipefail

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if ! (( $# )) || [[ $1 == -* ]]; then
  echo "usage: $0 run.toml [--nproc N] [--set a.b=value …]; e.g. runs/quickstart, runs/gpt2-124m-1gpu" >&2
  exit 2
fi
run=$1
shift
nproc=
arguments=()
while (( $# )); do
  case $1 in
    --nproc) nproc=${2:?--nproc needs a number}; shift 2 ;;
    --nproc=*) nproc=${1#*=}; shift ;;
    *) arguments+=("$1"); shift ;;
  esac
done

python=${PYTHON:-}
if [[ -z $python && -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
python=${python:-python3}
if [[ -f $root/megatron_port/__init__.py ]]; then export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}; fi
if [[ -z $nproc ]]; then
  nproc=$("$python" -c 'import torch; print(torch.cuda.device_count() or 1)')
fi
if [[ -n ${DATA:-} ]]; then arguments+=(--data "$DATA"); fi
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$nproc" \
  -m megatron_port train "$run" "${arguments[@]}"
