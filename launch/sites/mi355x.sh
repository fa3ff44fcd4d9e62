# shellcheck shell=bash disable=SC2034,SC2154
# Made by `megatron-port launch sites` from configs/clusters/mi355x.toml; edit that.
site_name=mi355x
site_interface=''
site_cores_per_task=0
site_srun=()
site_setup() {
  site_local_disk=/tmp
}
