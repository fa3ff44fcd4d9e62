# shellcheck shell=bash disable=SC2034,SC2154
# Made by `megatron-port launch sites` from configs/clusters/perlmutter.toml; edit that.
site_name=perlmutter
site_interface=hsn0
site_cores_per_task=32
site_srun=(--cpu-bind=cores --gpu-bind=none)
site_setup() {
  site_local_disk=/tmp
  load_modules cudatoolkit nccl
  export MPICH_GPU_SUPPORT_ENABLED=0
  export FI_CXI_SAFE_DEVMEM_COPY_THRESHOLD=16777216
  export NCCL_SOCKET_IFNAME='hsn0,hsn1,hsn2,hsn3'
  export NCCL_NET_GDR_LEVEL=PHB
  export NCCL_CROSS_NIC=1
  export FI_CXI_DISABLE_HOST_REGISTER=1
  export FI_MR_CACHE_MONITOR=userfaultfd
}
