# shellcheck shell=bash disable=SC2034,SC2154
# Made by `megatron-port launch sites` from configs/clusters/lumi.toml; edit that.
site_name=lumi
site_interface=hsn0
site_cores_per_task=7
site_srun=(
  '--cpu-bind=mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000'
)
site_container=singularity
site_image=''
site_container_python=python3
site_container_options=(--rocm)
site_setup() {
  site_local_disk=/tmp
  load_modules LUMI/24.03 partition/G cray-python
  export NCCL_SOCKET_IFNAME='hsn0,hsn1,hsn2,hsn3'
  export FI_MR_CACHE_MONITOR=userfaultfd
  export CXI_FORK_SAFE=1
  export CXI_FORK_SAFE_HP=1
  export FI_CXI_DISABLE_CQ_HUGETLB=1
  export FI_CXI_DEFAULT_CQ_SIZE=131072
  export HSA_FORCE_FINE_GRAIN_PCIE=1
  export MIOPEN_USER_DB_PATH="$site_local_disk"/miopen-"$SLURM_JOB_ID"
  export MIOPEN_CUSTOM_CACHE_DIR="$site_local_disk"/miopen-"$SLURM_JOB_ID"
  site_mounts=(/pfs /scratch /projappl /flash /opt/cray /var/spool/slurmd /usr/lib64/libcxi.so.1:/usr/lib64/libcxi.so.1:ro)
}
