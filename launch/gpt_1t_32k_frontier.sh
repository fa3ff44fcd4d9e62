#!/bin/bash
# shellcheck disable=SC2034
# sbatch [options] launch/gpt_1t_32k_frontier.sh [--set a.b=value …]; options of sbatch win over the lines below.
# Made by `megatron-port launch sites` from configs/runs/gpt-1t-32k-frontier.toml; edit that.
#SBATCH --job-name=gpt-1t-32k-frontier
#SBATCH --nodes=384
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --time=06:00:00
#SBATCH --partition=batch
#SBATCH --signal=B:USR1@1800
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --output=%x-%j.out
#SBATCH --exclusive
#SBATCH --network=disable_rdzv_get
#SBATCH --constraint=nvme

set -euo pipefail

job_run=runs/gpt-1t-32k-frontier
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
