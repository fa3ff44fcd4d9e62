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

each_node() {  # one task a node of the allocation
  srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --export=ALL --kill-on-bad-exit=0 "$@" \
    < /dev/null
}

on_nodes() {  # LIST COMMAND…: one task on each node of a list, names with commas between them
  local list=$1 names
  shift
  IFS=, read -ra names <<< "$list"
  srun --nodelist="$list" --nodes="${#names[@]}" --ntasks="${#names[@]}" --ntasks-per-node=1 --export=ALL \
    --kill-on-bad-exit=0 "$@" < /dev/null
}

# On the nodes. mkdir makes the folder itself or fails, whatever another user has put there; nobody else can enter it.
# shellcheck disable=SC2016
stage_prepare='umask 077
bad() { printf "%s\n" "$*" > "$results/bad-$SLURMD_NODENAME"; exit 0; }
to=$1 needed=$2 results=$3
why=$(mkdir -- "$to" 2>&1) || bad "$why"
free=$(df -Pk -- "$to" | awk "NR == 2 { print \$4 }")
(( ${free:-0} >= needed )) || bad "$((${free:-0} >> 10)) MiB free for $to, at least $((needed >> 10)) needed"
: > "$results/ready-$SLURMD_NODENAME"'
# shellcheck disable=SC2016
stage_unpack='umask 077
bad() { printf "%s\n" "$*" > "$results/bad-$SLURMD_NODENAME"; exit 0; }
to=$1 results=$2
why=$({ mkdir -- "$to/env" && tar -xf "$to/env.tar" -C "$to/env" && rm -- "$to/env.tar"; } 2>&1) \
  || bad "$(printf "%s" "$why" | tail -n 1)"
[[ -x $to/env/bin/python ]] || : > "$results/no-python"
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

# NAME…: copy the archive to these nodes' own disks, for 3,072 ranks do not import from one file system. Sets `fit`.
stage_environment() {
  local archive=${STAGE:-$job_stage} results=$run_folder/staging-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} before name why
  fit=("$@")
  [[ -n $archive ]] || return 0
  [[ -r $archive ]] || die "the archive $archive (STAGE, launch.stage) cannot be read on $(hostname -s)"
  rm -rf "$results"
  mkdir -p "$results"
  : > "$results/unfit.txt"
  # Nobody can know the name and prepare the folder: /tmp of a shared node is everybody's.
  staged=$site_local_disk/megatron_port-$SLURM_JOB_ID-$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')
  say "staging $archive to $staged on ${#fit[@]} nodes"
  on_nodes "$(IFS=,; echo "${fit[*]}")" timeout 120 bash -c "$stage_prepare" stage "$staged" \
    "$(( 2 * ($(stat -Lc %s "$archive") >> 10) ))" "$results" || true
  staged_nodes ready "${fit[@]}"
  until stage_copy "$archive" "$staged/env.tar"; do  # a disk that fills up or fails ends the copy to all nodes
    before=${#fit[@]}
    while read -r name why; do printf '%s\n' "$why" > "$results/bad-$name"; rm -f "$results/ready-$name"; done < <(
      sed -nE 's/^sbcast: error: REQUEST_FILE_BCAST\(([^)]+)\): /\1 sbcast: /p' "$results/sbcast.log" | sort -u)
    staged_nodes ready "${fit[@]}"
    (( ${#fit[@]} < before )) || die "sbcast of $archive to $staged failed, see above"
  done
  on_nodes "$(IFS=,; echo "${fit[*]}")" bash -c "$stage_unpack" stage "$staged" "$results" || true
  staged_nodes unpacked "${fit[@]}"
  [[ ! -e $results/no-python ]] \
    || die "$archive has no bin/python at its top; make it with: tar -C ENVIRONMENT -cf env.tar ."
  rank_python=$staged/env/bin/python
  unfit=$results/unfit.txt
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

check_nodes() {  # leave out nodes, and nodes with links, that preflight does not trust; stage on those that it does
  local out=$run_folder/preflight-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} good
  mkdir -p "$out"
  each_node "$python" -m megatron_port preflight node "${run[@]}" --out "$out" \
    || say "preflight did not run on every node"
  not_started=nodes
  select_nodes "$out"
  mapfile -t good < <(scontrol show hostnames "$(< "$out/good.txt")")
  not_started=setup
  stage_environment "${good[@]}"
  not_started=nodes
  [[ ! -s $unfit ]] || select_nodes "$out"
  (  # over every good node, so that a spare's links are known before it is needed
    ranks "${#fit[@]}" "$(IFS=,; echo "${fit[*]}")" "$rank_python" -m megatron_port preflight network "${run[@]}" \
      --out "$out" --master-addr "$(first_node_address "${fit[0]}")" --master-port "$((port + 1))"
  ) || say "preflight found the network below its thresholds, see above"
  select_nodes "$out"
  not_started=setup
}

select_nodes() {  # FOLDER of preflight's findings: as many good nodes as the layout needs, as they are allocated
  local options=()
  [[ ! -s $unfit ]] || options=(--unfit "$unfit")
  "$python" -m megatron_port preflight report "${run[@]}" --out "$1" --nodes "$SLURM_JOB_NODELIST" \
    --select "$node_count" "${options[@]}" || exit $?
  node_list=$(< "$1/selected.txt")
}

stage_alone() {  # without preflight: any nodes that staging leaves, as many as the layout needs
  stage_environment "${nodes[@]}"
  [[ -s $unfit ]] || return 0
  not_started=nodes
  (( ${#fit[@]} >= node_count )) || die "the environment is staged on ${#fit[@]} of ${#nodes[@]} nodes, the run needs \
$node_count; submit again with --exclude=$(cut -f1 "$unfit" | paste -sd,), or with spare nodes (SPARE_NODES)"
  node_list=$(IFS=,; echo "${fit[*]:0:node_count}")
  not_started=setup
}

taken() {  # ADDRESS PORT: somebody listens there
  # shellcheck disable=SC2016
  timeout 2 bash -c ': < "/dev/tcp/$1/$2"' taken "$1" "$2" 2> /dev/null
}

choose_port() {  # a port of the master's address that nobody has; preflight's is the one after it
  local tries
  for (( tries = 0; tries < 50; ++tries )); do
    taken "$1" "$port" || return 0
    [[ -z $port_given ]] \
      || die "port $port of $1, which --master-port names, is taken; end what uses it, or leave --master-port out"
    say "port $port of $1 is taken, trying the next"
    port=$(( 15000 + (port - 15000 + 34) % 17000 ))
  done
  die "50 ports of $1 from $(( 15000 + (port - 15000 + 17000 - 34 * 50) % 17000 )) on are all taken"
}

srun_pid=''
asked=''
staged=''
rank_python=''  # the ranks' interpreter; `python` is this host's
unfit=''  # nodes that could not be staged: NAME<TAB>REASON
fit=()
not_started=''  # why, from the start of an attempt until its ranks run; then every exit is accounted for

finish() {  # [CODE of srun]: however the script ends, say how, and queue the job again where that is wanted
  local code=$? options=()
  trap - EXIT
  if (( $# )); then code=$1; elif [[ -z $not_started ]]; then exit "$code"; fi
  [[ -z $not_started ]] || options=(--not-started "$not_started")
  [[ -z $staged ]] || each_node rm -rf -- "$staged" || true
  "$python" -m megatron_port launch after "${run[@]}" --code "$code" --srun-log "$srun_log" --asked "$asked" \
    "${options[@]}" -- "${script_arguments[@]}"
  exit $?
}
on_signal() {  # NAME
  asked=${asked:+$asked }$1
  say "$1 received at $(date +%T)"
  # srun passes USR1 on to every rank. TERM it would take for itself, and SLURM sends that to the ranks anyway.
  [[ $1 != USR1 || -z $srun_pid ]] || kill -s USR1 "$srun_pid" 2> /dev/null || true
}

launch_main() {
  local nodes node_count tasks_per_node cores_per_task node_list='' port address='' port_given='' python run_folder
  local code=0 err='' err_pid
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
  type -P srun > /dev/null \
    || die "no srun on $(hostname -s) (PATH is $PATH); is SLURM's client installed here, or its module loaded?"

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
  rank_python=$python
  if [[ ${PREFLIGHT:-$job_preflight} == 1 ]]; then check_nodes; else stage_alone; fi
  if [[ -z $address ]]; then
    address=$(first_node_address "$(scontrol show hostnames "${node_list:-$SLURM_JOB_NODELIST}" | head -n 1)")
  fi
  choose_port "$address"
  say "job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0}: $node_count nodes × $tasks_per_node tasks" \
    "(${node_list:-$SLURM_JOB_NODELIST}), master $address:$port"
  if [[ $asked == *TERM* ]]; then not_started=ended; exit 3; fi
  if [[ $asked == *USR1* ]]; then not_started=signal; exit 3; fi
  not_started=''

  # What srun itself says of lost tasks is kept apart from what thousands of ranks may say.
  exec {err}> >(tee >(grep --line-buffered -E '^(srun|slurmstepd(-[^ :]+)?): ' > "$srun_log") >&2)
  err_pid=$!
  ranks "$node_count" "$node_list" "$rank_python" -m megatron_port train "${run[@]}" "${train_only[@]}" \
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
      --master-port) port=${2-} port_given=1; shift "$(( $# > 1 ? 2 : 1 ))" ;;
      --master-port=*) port=${1#*=} port_given=1; shift ;;
      --master-addr) address=${2-}; shift "$(( $# > 1 ? 2 : 1 ))" ;;
      --master-addr=*) address=${1#*=}; shift ;;
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
