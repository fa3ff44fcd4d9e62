# shellcheck shell=bash disable=SC2034,SC2154
# Made by `megatron-port launch sites` from configs/clusters/mi300x.toml; edit that.
site_name=mi300x
site_interface=''
site_cores_per_task=0
site_srun=()
site_setup() {
  site_local_disk=/tmp
}
