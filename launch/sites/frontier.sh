# shellcheck shell=bash disable=SC2034,SC2154
# Made by `megatron-port launch sites` from configs/clusters/frontier.toml; edit that.
site_name=frontier
site_interface=hsn0
site_cores_per_task=7
site_srun=(--gpus-per-task=1 --gpu-bind=closest)
site_setup() {
  site_local_disk=/mnt/bb/"$port_user"
  load_modules PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 rccl-net-plugin craype-accel-amd-gfx90a
  export NCCL_CROSS_NIC=1
  export NCCL_NET_GDR_LEVEL=PHB
  export NCCL_SOCKET_IFNAME='hsn0,hsn1,hsn2,hsn3'
  export HSA_FORCE_FINE_GRAIN_PCIE=1
  export FI_MR_CACHE_MONITOR=kdreg2
  export FI_CXI_DISABLE_HOST_REGISTER=1
  export FI_CXI_DEFAULT_CQ_SIZE=131072
  export FI_CXI_RDZV_PROTO=alt_read
  export FI_CXI_RDZV_EAGER_SIZE=0
  export FI_CXI_RDZV_THRESHOLD=0
  export FI_CXI_RDZV_GET_MIN=0
  export FI_CXI_DEFAULT_TX_SIZE=2048
  export FI_CXI_RX_MATCH_MODE=hybrid
  export MIOPEN_USER_DB_PATH="$site_local_disk"/miopen-"$SLURM_JOB_ID"
  export MIOPEN_CUSTOM_CACHE_DIR="$site_local_disk"/miopen-"$SLURM_JOB_ID"
}
