# shellcheck shell=bash disable=SC2154,SC2034
# The common part of every job script: nodes, master, environment, one srun, and what follows it.
#
# The script that sources this has set:
#   site_name site_interface site_local_disk site_cores_per_task  site_srun=(…)  site_setup()
#   job_run job_python job_stage job_spare_nodes job_preflight    job_overrides=(…)  job_setup()
# and may have set: job_record (the launch record that it is of, docs/frontier.md), job_no_kill (sbatch --no-kill is on)
#   site_container (and site_image site_container_python site_mounts=(…) site_container_options=(…))
# From the environment of sbatch: DATA (prefix of a corpus), STAGE (archive of an environment), PYTHON
# (interpreter), IMAGE (of the container), PREFLIGHT=1, SPARE_NODES=N, SRUN_OPTIONS (more options for the ranks' srun; with
# launch.when_lost "replace" it has one task a node). Arguments of the
# script go to `megatron-port train`; a first one that is no option is the run file. docs/frontier.md shows it.

# shellcheck source=launch/stage.sh
source "${BASH_SOURCE[0]%/*}/stage.sh"
# shellcheck source=launch/container.sh
source "${BASH_SOURCE[0]%/*}/container.sh"

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
  # What a launch record keeps comes first; a checkout is used as it is; an installed package needs no path.
  if [[ -n $job_record ]]; then use_code
  elif [[ -f $root/megatron_port/__init__.py ]]; then export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}; fi
  type -P "$python" > /dev/null || die "$python (PYTHON, launch.python) is no program on $(hostname -s)"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null \
    || die "$python is $("$python" --version 2>&1 | head -n 1); this needs Python 3.10 or newer on $(hostname -s), \
also beside a container: set PYTHON, or load a module that has it"
  "$python" -c 'import megatron_port' 2> /dev/null \
    || die "$python on $(hostname -s) cannot import megatron_port; set PYTHON, or make setup in $root"
}

use_code() {  # of the launch record
  [[ ${PYTHONPATH:-}: == "$job_record/code:"* ]] || export PYTHONPATH=$job_record/code${PYTHONPATH:+:$PYTHONPATH}
}

count_tasks() {  # tasks on each node: --ntasks-per-node, a node's share of -n, one for each GPU, or one
  local all=${SLURM_NTASKS:-} cpus=${SLURM_JOB_CPUS_PER_NODE:-} option threads
  tasks_per_node=${SLURM_NTASKS_PER_NODE:-}
  if [[ -n $all ]] && (( all != ${tasks_per_node:-0} * ${#nodes[@]} )); then
    (( all % ${#nodes[@]} == 0 )) || die "$all tasks (-n) on ${#nodes[@]} nodes (-N) are not as many on each; ask for \
-n $(( (all / ${#nodes[@]} + 1) * ${#nodes[@]} )), or for --ntasks-per-node"
    tasks_per_node=$(( all / ${#nodes[@]} ))
  fi
  : "${tasks_per_node:=${SLURM_GPUS_ON_NODE:-1}}"
  cores_per_task=${SLURM_CPUS_PER_TASK:-$site_cores_per_task}
  # Without -c a task's share of what was allocated, where that is alike on all nodes.
  if (( ! cores_per_task )) && [[ $cpus =~ ^([0-9]+)(\(x[0-9]+\))?$ ]]; then
    cores_per_task=$(( BASH_REMATCH[1] / tasks_per_node ))
  fi
  threads=$(( cores_per_task > 0 ? cores_per_task : 1 ))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
  (( cores_per_task )) || return 0
  for option in "${site_srun[@]}" ${SRUN_OPTIONS:-}; do
    [[ $option != --cpu-bind* ]] || return 0
  done
  site_srun=(--cpu-bind=cores "${site_srun[@]}")
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

ranks() {  # NODES LIST COMMAND…: the command as every rank of that many nodes (LIST may be empty: any of the job's)
  local options=(--nodes="$1" --ntasks="$(($1 * tasks_per_node))" --ntasks-per-node="$tasks_per_node"
    --export=ALL --kill-on-bad-exit=1 --distribution=block "${container_srun[@]}")
  (( cores_per_task )) && options+=(--cpus-per-task="$cores_per_task")
  [[ -z $2 ]] || options+=(--nodelist="$2")
  shift 2
  local more=()
  read -ra more <<< "${SRUN_OPTIONS:-}"  # the last of two equal options wins in srun
  exec srun "${options[@]}" "${site_srun[@]}" "${more[@]}" "$@" < /dev/null
}

agents() {  # LIST COMMAND…: the command once on each node of the list, where it forks the node's ranks
  local list=$1 names option options=() gpus=0
  shift
  IFS=, read -ra names <<< "$list"
  for option in "${site_srun[@]}"; do
    case $option in
      --gpus-per-task=*) gpus=$(( ${option##*[=:]} * tasks_per_node )) ;;
      --gpu-bind=* | --cpu-bind=* | --ntasks-per-gpu=*) ;;  # a rank finds its own device and cores (run.affinity)
      *) options+=("$option") ;;
    esac
  done
  (( ! gpus )) || options+=(--gpus-per-node="$gpus")
  # A node that fails ends neither the step nor the other nodes' tasks; the run's agent decides.
  options+=(--nodelist="$list" --nodes="${#names[@]}" --ntasks="${#names[@]}" --ntasks-per-node=1 --export=ALL
    --no-kill --kill-on-bad-exit=0 --wait=0 --distribution=block "${container_srun[@]}")
  (( cores_per_task )) && options+=(--cpus-per-task="$(( cores_per_task * tasks_per_node ))")
  local more=()
  read -ra more <<< "${SRUN_OPTIONS:-}"
  exec srun "${options[@]}" "${more[@]}" "$@" < /dev/null
}

agent_nodes() {  # every node of the job that may train, as they are allocated, with commas between them
  local name list=() good=("${fit[@]}") trusted=$run_folder/preflight-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}/good.txt
  # After preflight those that it still trusts, network included.
  if [[ -n $node_list && -s $trusted ]]; then
    mapfile -t good < <(scontrol show hostnames "$(< "$trusted")" && tr , '\n' <<< "$node_list")
  fi
  for name in "${nodes[@]}"; do
    [[ ${#good[@]} -gt 0 && " ${good[*]} " != *" $name "* ]] || list+=("$name")
  done
  (IFS=,; echo "${list[*]}")
}

check_nodes() {  # leave out nodes, and nodes with links, that preflight does not trust; stage on those that it does
  local out=$run_folder/preflight-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0} good
  mkdir -p "$out"
  each_node "${container_srun[@]}" "${inside[@]}" "$rank_python" -m megatron_port preflight node "${run[@]}" --out "$out" \
    || say "preflight did not run on every node"
  not_started=nodes
  select_nodes "$out"
  mapfile -t good < <(scontrol show hostnames "$(< "$out/good.txt")")
  not_started=setup
  stage_environment "${good[@]}"
  not_started=nodes
  [[ ! -s $unfit ]] || select_nodes "$out"
  (  # over every good node, so that a spare's links are known before it is needed
    ranks "${#fit[@]}" "$(IFS=,; echo "${fit[*]}")" "${rank_environment[@]}" "${inside[@]}" "$rank_python" \
      -m megatron_port preflight network "${rank_run[@]}" \
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
rank_python=''  # the ranks' interpreter; `python` is this host's
not_started=''  # why, from the start of an attempt until its ranks run; then every exit is accounted for

finish() {  # [CODE of srun]: however the script ends, say how, and queue the job again where that is wanted
  local code=$? options=()
  trap - EXIT
  if (( $# )); then code=$1; elif [[ -z $not_started ]]; then exit "$code"; fi
  [[ -z $not_started ]] || options=(--not-started "$not_started")
  [[ -z $staged ]] || each_node rm -rf -- "$staged" || true
  "$python" -m megatron_port launch after "${run[@]}" --record "$job_record" --code "$code" --srun-log "$srun_log" \
    --asked "$asked" "${options[@]}"
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
  local when_lost=stop count train agent_hosts
  local run rank_run train_only=() srun_log=''  # run: what says which run it is; train_only: what only `train` understands
  [[ -n ${SLURM_JOB_ID:-} ]] \
    || die "no SLURM job here: submit this script with sbatch (launch/torchrun.sh runs on one node without SLURM)"
  trap 'on_signal USR1' USR1
  trap 'on_signal TERM' TERM
  local script_arguments=("$@")
  job_record=${job_record:-}
  if (( $# )) && [[ $1 != -* ]]; then fixed "the run file $1"; job_run=$1; shift; fi
  if [[ -n $job_record ]]; then job_run=$job_record/config.toml job_overrides=(); fi
  [[ -n $job_run ]] || die "give a run file: sbatch … ${SLURM_JOB_NAME:-launch/slurm.sh} run.toml [--set a.b=value …]" 2

  site_container=${site_container:-} site_image=${site_image:-}
  site_setup
  job_setup
  choose_python
  type -P srun > /dev/null \
    || die "no srun on $(hostname -s) (PATH is $PATH); is SLURM's client installed here, or its module loaded?"

  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  (( ${#nodes[@]} )) || die "scontrol show hostnames $SLURM_JOB_NODELIST named no node"
  count_tasks
  local spares=${SPARE_NODES:-$job_spare_nodes}
  node_count=$(( ${#nodes[@]} - spares ))
  (( node_count > 0 )) || die "${#nodes[@]} nodes with $spares spares leave none to train on"
  MEGATRON_PORT_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')  # names the ranks' keys in the rendezvous store
  export MEGATRON_PORT_SECRET
  port=$(( 15000 + (31 * SLURM_JOB_ID + 2 * ${SLURM_RESTART_COUNT:-0}) % 17000 ))
  run=("$job_run" --set "cluster.nodes=$node_count" --set "cluster.gpus_per_node=$tasks_per_node" "${job_overrides[@]}")
  [[ -z ${DATA:-} ]] || run+=(--data "$DATA")
  take_arguments "$@"
  open_record
  srun_log=$run_folder/srun-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.log
  : > "$srun_log"
  not_started=setup
  trap finish EXIT
  rank_python=$python
  [[ -z $site_container ]] || rank_python=${site_container_python:-python3}
  container "${IMAGE:-$site_image}"
  if [[ ${PREFLIGHT:-$job_preflight} == 1 ]]; then check_nodes; else stage_alone; fi
  if [[ $when_lost == replace ]]; then
    node_list=$(agent_nodes)
    [[ ${job_no_kill:-} == 1 ]] || say "launch.when_lost is replace: unless this job was submitted with sbatch \
--no-kill, SLURM ends it when a node fails"
  fi
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
  train=("${rank_environment[@]}" "${inside[@]}" "$rank_python" -m megatron_port train "${rank_run[@]}"
    "${train_only[@]}" --master-addr "$address" --master-port "$port")
  if [[ $when_lost == replace ]]; then
    IFS=, read -ra agent_hosts <<< "$node_list"
    count=${#agent_hosts[@]}
    agents "$node_list" "${train[@]}" --nproc "$tasks_per_node" --set "launch.spare_nodes=$(( count - node_count ))" \
      2>&"$err" &
  else
    ranks "$node_count" "$node_list" "${train[@]}" 2>&"$err" &
  fi
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

open_record() {  # from here on the launch record says what runs, not what the script was given
  local told options=()
  [[ -z $job_record ]] || options=(--record "$job_record")
  told=$("$python" -m megatron_port launch before "${run[@]}" "${options[@]}" -- "${script_arguments[@]}") || exit $?
  { read -r run_folder; read -r job_record; read -r when_lost || when_lost=stop; } <<< "$told"
  use_code
  run=("$job_record/config.toml" --set "cluster.nodes=$node_count" --set "cluster.gpus_per_node=$tasks_per_node")
  [[ -z ${DATA:-} ]] || run+=(--data "$DATA")  # SLURM keeps the environment of the submission
  rank_run=("${run[@]}")
  # One process has read it; srun hands it to every rank.
  MEGATRON_PORT_CONFIG_FILE=$job_record/config.toml
  MEGATRON_PORT_CONFIG=$(< "$MEGATRON_PORT_CONFIG_FILE") || die "$MEGATRON_PORT_CONFIG_FILE cannot be read"
  if (( ${#MEGATRON_PORT_CONFIG} < 100000 )); then export MEGATRON_PORT_CONFIG MEGATRON_PORT_CONFIG_FILE; fi
}

fixed() {  # WHAT was given to a script whose configuration a launch record holds (its own arguments are in there)
  [[ -z $job_record || -n ${job_arguments:-} ]] || die "$1 comes too late: the configuration of this script is kept in \
$job_record; instead: megatron-port launch submit RUN --set …" 2
}

take_arguments() {  # the script's own, after the run file
  while (( $# )); do
    case $1 in
      --set | --data) fixed "$1"; run+=("$1" "${2-}"); written_before "${2-}"; shift "$(( $# > 1 ? 2 : 1 ))" ;;
      --set=* | --data=*) fixed "$1"; run+=("$1"); written_before "${1#*=}"; shift ;;
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
