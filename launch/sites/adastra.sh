# shellcheck shell=bash disable=SC2034,SC2154
# Made by `megatron-port launch sites` from configs/clusters/adastra.toml; edit that.
site_name=adastra
site_interface=hsn0
site_cores_per_task=8
site_srun=(--threads-per-core=1 --gpus-per-task=1 --gpu-bind=closest)
site_setup() {
  site_local_disk=/tmp
  load_modules cpe/23.12 craype-accel-amd-gfx90a craype-x86-trento
  export NCCL_SOCKET_IFNAME='hsn0,hsn1,hsn2,hsn3'
  export FI_MR_CACHE_MONITOR=userfaultfd
  export FI_CXI_DISABLE_HOST_REGISTER=1
  export FI_CXI_DEFAULT_CQ_SIZE=131072
  export HSA_FORCE_FINE_GRAIN_PCIE=1
  export MIOPEN_USER_DB_PATH="$site_local_disk"/miopen-"$SLURM_JOB_ID"
  export MIOPEN_CUSTOM_CACHE_DIR="$site_local_disk"/miopen-"$SLURM_JOB_ID"
}
