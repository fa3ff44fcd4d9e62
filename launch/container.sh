# shellcheck shell=bash disable=SC2154,SC2034
# Ranks in a container; what speaks to SLURM (srun, scontrol, sbcast, the decisions about the job) stays on the host.
# Sourced by common.sh, whose variables it uses.

inside=()  # what comes before the ranks' interpreter
container_srun=()  # what srun is told
[[ -n ${site_mounts+set} ]] || site_mounts=()
[[ -n ${site_container_options+set} ]] || site_container_options=()

container() {  # IMAGE: set `inside` and `container_srun`
  local image=$1 mounts=() mount name
  inside=() container_srun=()
  [[ -n $site_container ]] || return 0
  [[ -n $image ]] || die "the ranks run in a container ($site_container) on $site_name, and no image is named: set \
cluster.container_image, or IMAGE=… sbatch …"
  [[ $image != /* && $image != ./* || -r $image ]] || die "the image $image cannot be read on $(hostname -s)"
  mounts=("$PWD" "$(dirname "$(dirname "$job_record")")" "${site_mounts[@]}")
  [[ ! -d $site_local_disk ]] || mounts+=("$site_local_disk")
  [[ ! -d $(dirname "${DATA:-/}") || -z ${DATA:-} ]] || mounts+=("$(dirname "$DATA")")
  mapfile -t mounts < <(printf '%s\n' "${mounts[@]}" | awk '{ p = $0; if (p !~ /:/) p = p ":" p } !seen[p]++ { print p }')
  if [[ $site_container == pyxis ]]; then
    container_srun=(--container-image="$image" --container-mounts="$(IFS=,; echo "${mounts[*]}")"
      --container-workdir="$PWD" "${site_container_options[@]}")
    return 0
  fi
  type -P "$site_container" > /dev/null \
    || die "no $site_container on $(hostname -s), and the ranks run in a container (cluster.container); load its module"
  case $site_container in
    apptainer | singularity)
      inside=("$site_container" exec --pwd "$PWD")
      for mount in "${mounts[@]}"; do inside+=(--bind "$mount"); done ;;
    podman | podman-hpc)
      inside=("$site_container" run --rm --network=host --ipc=host --pid=host --workdir="$PWD")
      for mount in "${mounts[@]}"; do inside+=(--volume "$mount"); done
      for name in SLURM_ MEGATRON_PORT_ PYTHON OMP_ NCCL_ RCCL_ FI_ HSA_ ROCR_ HIP_ CUDA_ TORCH PYTORCH_ MIOPEN_ GLOO_ \
        UCX_ TIKTOKEN_ DS_ CXI_ MPICH_; do inside+=(--env "$name*"); done ;;
    shifter)
      inside=(shifter --image="$image" --workdir="$PWD")
      for mount in "${mounts[@]}"; do inside+=(--volume="$mount"); done ;;
    *) die "cluster.container $site_container is unknown" 2 ;;
  esac
  inside+=("${site_container_options[@]}")
  [[ $site_container == shifter ]] || inside+=("$image")
}
