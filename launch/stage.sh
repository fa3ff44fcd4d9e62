# shellcheck shell=bash disable=SC2154,SC2034
# Environment, code and configuration on each node's own disk: thousands of ranks do not read one file system.
# Sourced by common.sh, whose variables it uses.

staged=''  # folder on the nodes' disks
unfit=''  # file: nodes that could not be staged, NAME<TAB>REASON
fit=()
rank_environment=()

# On the nodes. mkdir makes the folder itself or fails, whatever another user has put there; nobody else can enter it.
# shellcheck disable=SC2016
stage_prepare='umask 077
bad() { printf "%s\n" "$*" > "$results/bad-$SLURMD_NODENAME"; exit 0; }
to=$1 needed=$2 results=$3
why=$(mkdir -- "$to" 2>&1) || bad "$why"
free=$(df -Pk -- "$to" | awk "NR == 2 { print \$4 }")
(( ${free:-0} >= needed )) || bad "$((${free:-0} >> 10)) MiB free for $to, at least $((needed >> 10)) needed"
: > "$results/ready-$SLURMD_NODENAME"'
# All cores unpack: an archive of `launch image` holds parts/NN.tar.zst, and unsquashfs is parallel by itself. What is
# written here stays in the node's page cache, so the first rank of a node finds it warm.
# shellcheck disable=SC2016
stage_unpack='umask 077
bad() { printf "%s\n" "$*" > "$results/bad-$SLURMD_NODENAME"; exit 0; }
part() {
  case $1 in
    *.zst) zstd -dcq -- "$1" | tar -xf - -C "$2" ;;
    *.gz) gzip -dc -- "$1" | tar -xf - -C "$2" ;;
    *) tar -xf "$1" -C "$2" ;;
  esac && rm -- "$1"
}
unpack() {
  set -o pipefail
  case $archive in
    *.sif) return 0 ;;
    *.sqsh | *.squashfs) unsquashfs -q -n -d "$to/env" "$archive" && rm -- "$archive" ;;
    *) mkdir -- "$to/env" && part "$archive" "$to/env" || return
      [[ ! -d $to/env/parts ]] && return 0
      export -f part
      find "$to/env/parts" -name "*.tar*" -print0 \
        | xargs -0 -P "$(nproc)" -I{} bash -o pipefail -c "part \"\$1\" \"\$2\"" unpack {} "$to/env" \
        && rmdir -- "$to/env/parts" ;;
  esac
}
to=$1 results=$2 archive=$3
why=$({ unpack && tar -xf "$to/code.tar" -C "$to"; } 2>&1) || bad "$(printf "%s" "$why" | tail -n 1)"
[[ $archive == *.sif || -x $to/env/bin/python ]] || : > "$results/no-python"
[[ ! -x $to/env/bin/python ]] || "$to/env/bin/python" -m compileall -q -j 0 "$to/code" > /dev/null 2>&1 || true
: > "$results/unpacked-$SLURMD_NODENAME"'

staged_nodes() {  # MARK NAME…: into `fit` the nodes that left MARK-NAME; the others, with the reason, into unfit.txt
  local mark=$1 name why
  shift
  fit=()
  for name in "$@"; do
    if [[ -e $results/$mark-$name ]]; then fit+=("$name"); continue; fi
    why="did not answer"
    if [[ -s $results/bad-$name ]]; then why=$(head -n 1 "$results/bad-$name"); fi
    say "staging failed on $name: $why" >&2
    printf '%s\t%s\n' "$name" "$why" >> "$results/unfit.txt"
  done
  (( ${#fit[@]} )) || die "staging failed on every node, see above; is $site_local_disk there?"
}

stage_copy() {  # ARCHIVE TO: sbcast takes a whole allocation or a step, so a step holds the nodes where some are unfit
  local holder='' step=$results/step error=0 where=()
  if (( ${#fit[@]} < ${#nodes[@]} )); then
    rm -f "$step"
    # shellcheck disable=SC2016
    on_nodes "$(IFS=,; echo "${fit[*]}")" bash -c \
      '[[ $SLURM_PROCID != 0 ]] || { echo "$SLURM_STEP_ID" > "$1.new" && mv "$1.new" "$1"; }; exec sleep 7200' \
      hold "$step" 2> /dev/null &
    holder=$!
    while [[ ! -s $step ]] && kill -0 "$holder" 2> /dev/null; do sleep 0.2; done
    [[ -s $step ]] || die "no step could be started on ${fit[*]}"
    where=(--jobid="$SLURM_JOB_ID.$(< "$step")")
  fi
  sbcast --force "${where[@]}" "$1" "$2" 2> "$results/sbcast.log" || error=$?
  cat "$results/sbcast.log" >&2
  if [[ -n $holder ]]; then
    scancel "$SLURM_JOB_ID.$(< "$step")" 2> /dev/null || true
    wait "$holder" 2> /dev/null || true
  fi
  return "$error"
}

copy_to_fit() {  # FILE TO: to the nodes in `fit`; a disk that fills up or fails ends a copy to all nodes, and is left out
  local before name why
  until stage_copy "$1" "$2"; do
    before=${#fit[@]}
    while read -r name why; do printf '%s\n' "$why" > "$results/bad-$name"; rm -f "$results/ready-$name"; done < <(
      sed -nE 's/^sbcast: error: REQUEST_FILE_BCAST\(([^)]+)\): /\1 sbcast: /p' "$results/sbcast.log" | sort -u)
    staged_nodes ready "${fit[@]}"
    (( ${#fit[@]} < before )) || die "sbcast of $1 to $2 failed, see above"
  done
}

# NAME…: copy the archive, and the code and configuration of the launch record, to these nodes' own disks. Sets `fit`.
stage_environment() {
  local archive=${STAGE:-$job_stage} image=${IMAGE:-$site_image} copied needed
  local results=$run_folder/staging-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
  fit=("$@")
  [[ -n $archive ]] || return 0
  [[ $archive != image ]] || archive=$image
  [[ -r $archive ]] || die "the archive $archive (STAGE, launch.stage) cannot be read on $(hostname -s)"
  needed=$(( 2 * ($(stat -Lc %s "$archive") >> 10) ))  # KiB, with the archive itself
  [[ ! -r $archive.bytes ]] || needed=$(( ($(stat -Lc %s "$archive") + $(< "$archive.bytes")) >> 10 ))
  rm -rf "$results"
  mkdir -p "$results"
  : > "$results/unfit.txt"
  # Nobody can know the name and prepare the folder: /tmp of a shared node is everybody's.
  staged=$site_local_disk/megatron_port-$SLURM_JOB_ID-$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')
  say "staging $archive to $staged on ${#fit[@]} nodes"
  on_nodes "$(IFS=,; echo "${fit[*]}")" timeout 120 bash -c "$stage_prepare" stage "$staged" \
    "$needed" "$results" || true
  staged_nodes ready "${fit[@]}"
  copied=$staged/$(basename "$archive")
  copy_to_fit "$archive" "$copied"
  tar -C "$job_record" --dereference -cf "$results/code.tar" code config.toml
  copy_to_fit "$results/code.tar" "$staged/code.tar"
  rm -f "$results/code.tar"
  on_nodes "$(IFS=,; echo "${fit[*]}")" bash -c "$stage_unpack" stage "$staged" "$results" "$copied" || true
  staged_nodes unpacked "${fit[@]}"
  [[ ! -e $results/no-python ]] \
    || die "$archive has no bin/python at its top; make it with megatron-port launch image, or tar -C ENVIRONMENT -cf env.tar ."
  unfit=$results/unfit.txt
  rank_run=("$staged/config.toml" "${rank_run[@]:1}")
  # From here on no rank looks for a module in the working directory, in a home directory or in the record.
  rank_environment=(env "PYTHONPATH=$staged/code" PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
    "LD_LIBRARY_PATH=$staged/env/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
  if [[ $archive == *.sif ]]; then container "$copied"; else rank_python=$staged/env/bin/python; fi
}
