# shellcheck shell=bash disable=SC2154,SC2034
# The common part of every job script: nodes, master, environment, one srun, and what follows it.
#
# The script that sources this has set:
#   site_name site_interface site_local_disk site_cores_per_task  site_srun=(…)  site_setup()
#   job_run job_python job_stage job_spare_nodes job_preflight    job_overrides=(…)  job_setup()
# From the environment of sbatch: DATA (prefix of a corpus), STAGE (archive of an environment), PYTHON
# (interpreter), PREFLIGHT=1, SPARE_NODES=N, SRUN_OPTIONS (more options for the ranks' srun). Arguments of the
# script go to `megatron-port train`; a first one that is no option is the run file. docs/frontier.md shows it.

port_user=${USER:-$(id -un)}

say() { printf 'launch: %s\n' "$*"; }
die() { printf 'error: %s\n' "$1" >&2; exit "${2:-3}"; }

load_modules() {  # NAME…
  local name start
  (( $# )) || return 0
  set +u  # Lmod and site profiles use unset variables
  if ! type module > /dev/null 2>&1; then
    for start in "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash" /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
      # shellcheck source=/dev/null
      if [[ -r $start ]]; then source "$start"; break; fi
    done
  fi
  type module > /dev/null 2>&1 \
    || die "no module command here, and $site_name asks for the modules $*; is this $site_name?"
  for name in "$@"; do
    module load "$name" || die "module load $name failed; module avail lists what $site_name has now"
  done
  set -u
  # Cray's modules name their libraries there; the loader looks only here.
  if [[ -n ${CRAY_LD_LIBRARY_PATH:-} ]]; then
    export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  fi
}

# NAME: its own address on the site's interface; on another host than NAME, what NAME resolves to
first_node_address() {
  local name=$1 address=
  if [[ $(hostname -s) == "${name%%.*}" && -n $site_interface ]]; then
    address=$(PATH=$PATH:/usr/sbin:/sbin ip -4 -o address show dev "$site_interface" scope global 2> /dev/null \
      | awk 'NR == 1 { sub("/.*", "", $4); print $4 }') || address=
    [[ -n $address ]] || say "interface $site_interface has no address on $name; using what the name resolves to" >&2
  fi
  if [[ -z $address ]]; then
    address=$(getent ahostsv4 "$name" | awk '$1 !~ /^127\./ { print $1; exit }') || address=
  fi
  printf '%s\n' "${address:-$name}"
}

choose_python() {
  local root
  root=$(cd -P "$launch_dir/.." && pwd)
  python=${PYTHON:-$job_python}
  if [[ -z $python && -x $root/.venv/bin/python ]]; then python=$root/.venv/bin/python; fi
  if [[ -z $python ]]; then python=$(command -v python3) || die "no python3; set PYTHON=/path/to/python"; fi
  # A checkout is used as it is; an installed package needs no path.
  if [[ -f $root/megatron_port/__init__.py ]]; then export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}; fi
  "$python" -c 'import megatron_port' 2> /dev/null \
    || die "$python on $(hostname -s) cannot import megatron_port; set PYTHON, or make setup in $root"
}

stage_environment() {  # copy the archive to every node's own disk: 3,072 ranks do not import from one file system
  local archive=${STAGE:-$job_stage} to=$site_local_disk/megatron_port-$SLURM_JOB_ID
  [[ -n $archive ]] || return 0
  staged=$to
  [[ -r $archive ]] || die "the archive $archive (STAGE, launch.stage) cannot be read on $(hostname -s)"
  say "staging $archive to $to on ${#nodes[@]} nodes"
  sbcast --force "$archive" "$to.tar" \
    || die "sbcast of $archive to $to.tar failed; is $site_local_disk there on each node?"
  # shellcheck disable=SC2016  # expanded on the nodes
  each_node bash -c 'mkdir -p "$1" && tar -xf "$1.tar" -C "$1" && rm "$1.tar"' stage "$to" \
    || die "the archive could not be unpacked on every node, see above"
  [[ -x $to/bin/python ]] || die "$archive has no bin/python at its top; make it with: tar -C ENVIRONMENT -cf env.tar ."
  python=$to/bin/python
}

each_node() {  # one task a node of the allocation
  srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=0 "$@" \
    < /dev/null
}

ranks() {  # NODES LIST COMMAND…: the command as every rank of that many nodes (LIST may be empty: any of the job's)
  local options=(--nodes="$1" --ntasks="$(($1 * tasks_per_node))" --ntasks-per-node="$tasks_per_node"
    --export=ALL --kill-on-bad-exit=1 --distribution=block)
  (( cores_per_task )) && options+=(--cpus-per-task="$cores_per_task")
  [[ -z $2 ]] || options+=(--nodelist="$2")
  shift 2
  local more=()
  read -ra more <<< "${SRUN_OPTIONS:-}"  # the last of two equal options wins in srun
  exec srun "${options[@]}" "${site_srun[@]}" "${more[@]}" "$@" < /dev/null
}

check_nodes() {  # leave out nodes, and nodes with links, that preflight does not trust
  local out=$run_folder/preflight-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
  mkdir -p "$out"
  each_node "$python" -m megatron_port preflight node "${run[@]}" --out "$out" \
    || say "preflight did not run on every node"
  not_started=nodes
  select_nodes "$out"
  (  # over every good node, so that a spare's links are known before it is needed
    mapfile -t good < <(scontrol show hostnames "$(< "$out/good.txt")")
    ranks "${#good[@]}" "$(< "$out/good.txt")" "$python" -m megatron_port preflight network "${run[@]}" \
      --out "$out" --master-addr "$(first_node_address "${good[0]}")" --master-port "$((port + 1))"
  ) || say "preflight found the network below its thresholds, see above"
  select_nodes "$out"
  not_started=setup
}

select_nodes() {  # FOLDER of preflight's findings: as many good nodes as the layout needs, as they are allocated
  "$python" -m megatron_port preflight report "${run[@]}" --out "$1" --nodes "$SLURM_JOB_NODELIST" \
    --select "$node_count" || exit $?
  node_list=$(< "$1/selected.txt")
}

srun_pid=''
asked=''
staged=''
not_started=''  # why, from the start of an attempt until its ranks run; then every exit is accounted for

finish() {  # [CODE of srun]: however the script ends, say how, and queue the job again where that is wanted
  local code=$? options=()
  trap - EXIT
  if (( $# )); then code=$1; elif [[ -z $not_started ]]; then exit "$code"; fi
  [[ -z $not_started ]] || options=(--not-started "$not_started")
  [[ -z $staged ]] || each_node rm -rf "$staged" || true
  [[ -z $staged ]] || choose_python
  "$python" -m megatron_port launch after "${run[@]}" --code "$code" --srun-log "$srun_log" --asked "$asked" \
    "${options[@]}" -- "${script_arguments[@]}"
  exit $?
}
on_signal() {  # NAME
  asked=$1
  say "$1 received at $(date +%T)"
  # srun passes USR1 on to every rank. TERM it would take for itself, and SLURM sends that to the ranks anyway.
  [[ $1 != USR1 || -z $srun_pid ]] || kill -s USR1 "$srun_pid" 2> /dev/null || true
}

launch_main() {
  local nodes node_count tasks_per_node cores_per_task node_list='' port address python run_folder code=0 err='' err_pid
  local run train_only=() srun_log=''  # run: what says which run it is; train_only: what only `train` understands
  [[ -n ${SLURM_JOB_ID:-} ]] \
    || die "no SLURM job here: submit this script with sbatch (launch/torchrun.sh runs on one node without SLURM)"
  trap 'on_signal USR1' USR1
  trap 'on_signal TERM' TERM
  local script_arguments=("$@")
  if (( $# )) && [[ $1 != -* ]]; then job_run=$1; shift; fi
  [[ -n $job_run ]] || die "give a run file: sbatch … ${SLURM_JOB_NAME:-launch/slurm.sh} run.toml [--set a.b=value …]" 2

  site_setup
  job_setup
  choose_python

  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  (( ${#nodes[@]} )) || die "scontrol show hostnames $SLURM_JOB_NODELIST named no node"
  tasks_per_node=${SLURM_NTASKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
  cores_per_task=${SLURM_CPUS_PER_TASK:-$site_cores_per_task}
  local spares=${SPARE_NODES:-$job_spare_nodes}
  node_count=$(( ${#nodes[@]} - spares ))
  (( node_count > 0 )) || die "${#nodes[@]} nodes with $spares spares leave none to train on"
  MEGATRON_PORT_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')  # names the ranks' keys in the rendezvous store
  export MEGATRON_PORT_SECRET
  port=$(( 15000 + (31 * SLURM_JOB_ID + 2 * ${SLURM_RESTART_COUNT:-0}) % 17000 ))
  run=("$job_run" --set "cluster.nodes=$node_count" --set "cluster.gpus_per_node=$tasks_per_node" "${job_overrides[@]}")
  [[ -z ${DATA:-} ]] || run+=(--data "$DATA")
  take_arguments "$@"

  run_folder=$("$python" -m megatron_port launch before "${run[@]}") || exit $?
  srun_log=$run_folder/srun-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.log
  : > "$srun_log"
  not_started=setup
  trap finish EXIT
  stage_environment
  if [[ ${PREFLIGHT:-$job_preflight} == 1 ]]; then check_nodes; fi
  address=$(first_node_address "$(scontrol show hostnames "${node_list:-$SLURM_JOB_NODELIST}" | head -n 1)")
  say "job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0}: $node_count nodes × $tasks_per_node tasks" \
    "(${node_list:-$SLURM_JOB_NODELIST}), master $address:$port"
  if [[ $asked == USR1 ]]; then not_started=signal; exit 3; fi
  not_started=''

  # What srun itself says of lost tasks is kept apart from what thousands of ranks may say.
  exec {err}> >(tee >(grep --line-buffered -E '^(srun|slurmstepd): ' > "$srun_log") >&2)
  err_pid=$!
  ranks "$node_count" "$node_list" "$python" -m megatron_port train "${run[@]}" "${train_only[@]}" \
    --master-addr "$address" --master-port "$port" 2>&"$err" &
  srun_pid=$!
  while :; do  # a signal ends wait, not srun
    code=0
    wait "$srun_pid" || code=$?
    kill -0 "$srun_pid" 2> /dev/null || break
  done
  exec {err}>&-
  wait "$err_pid" || true
  finish "$code"
}

take_arguments() {  # the script's own, after the run file
  while (( $# )); do
    case $1 in
      --set | --data) run+=("$1" "${2-}"); written_before "${2-}"; shift "$(( $# > 1 ? 2 : 1 ))" ;;
      --set=* | --data=*) run+=("$1"); written_before "${1#*=}"; shift ;;
      *) train_only+=("$1"); shift ;;
    esac
  done
}

written_before() {  # a.b=VALUE that the script had to know when it was made
  local instead=
  case ${1%%=*} in
    launch.preflight) instead="PREFLIGHT=1 sbatch …" ;;
    launch.spare_nodes) instead="SPARE_NODES=N sbatch …" ;;
    launch.stage) instead="STAGE=ARCHIVE sbatch …" ;;
    launch.python) instead="PYTHON=INTERPRETER sbatch …" ;;
    launch.signal_seconds) instead="sbatch --signal=B:USR1@SECONDS …" ;;
    launch.time | launch.account | launch.sbatch_options | launch.environment | cluster.modules | cluster.environment | \
      cluster.srun_options | cluster.sbatch_options | cluster.interface | cluster.partition | cluster.qos)
      instead="megatron-port launch submit RUN --set …" ;;
    *) return 0 ;;
  esac
  die "--set ${1%%=*} comes too late for a script that is made already; instead: $instead" 2
}
