#!/bin/bash
# shellcheck disable=SC2034
# sbatch [options] launch/qwen3_30b_frontier.sh [--set a.b=value …]; options of sbatch win over the lines below.
# Made by `megatron-port launch sites` from configs/runs/qwen3-30b-frontier.toml; edit that.
#SBATCH --job-name=qwen3-30b-frontier
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --time=02:00:00
#SBATCH --partition=batch
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --output=%x-%j.out
#SBATCH --exclusive
#SBATCH --network=disable_rdzv_get
#SBATCH --constraint=nvme

set -euo pipefail

job_run=runs/qwen3-30b-frontier
job_overrides=()
job_python=''
job_stage=''
job_spare_nodes=0
job_preflight=0
job_setup() {
  :
}

# sbatch runs a copy of this file, so its own place is asked last.
launch_dir=${MEGATRON_PORT_LAUNCH:-}
if [[ -z $launch_dir ]]; then
  submitted=${SLURM_JOB_ID:+$(scontrol show job "$SLURM_JOB_ID" 2> /dev/null | sed -n 's/^ *Command=//p')} || submitted=
  for launch_dir in "${SLURM_SUBMIT_DIR:-.}"{/launch,} "$(dirname "${submitted%%.sh *}")" \
    "$(dirname "${BASH_SOURCE[0]}")"; do
    if [[ -r $launch_dir/common.sh ]]; then break; fi
  done
fi
if [[ ! -r $launch_dir/common.sh ]]; then
  echo "error: no common.sh in $launch_dir; set MEGATRON_PORT_LAUNCH to the folder launch/ of megatron_port" >&2
  exit 3
fi
# shellcheck source=/dev/null
source "$launch_dir/sites/frontier.sh"
# shellcheck source=/dev/null
source "$launch_dir/common.sh"
launch_main "$@"
