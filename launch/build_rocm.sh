# shellcheck shell=bash disable=SC2154
# The steps of an environment on an AMD machine; launch/build_frontier.sh sources it after its site and common.sh.
#
# What it makes is .venv of this checkout: torch's ROCm wheel, DeepSpeed with its ops, apex, flash-attn (Composable
# Kernel) and our own kernels, all compiled here with the site's hipcc, and then it lets `doctor --strict` judge.
# A step leaves a stamp in .venv/stamps that holds what it was made from; a stamp of something else is made again.

build_torch=${TORCH_VERSION:-2.11.0}
# The pins of docker/rocm.Dockerfile.
build_apex=daed85255d51476425080e7e6203f0bee6d7e4cc
build_flash=v2.8.3

build_main() {  # ARCHITECTURES
  local build_archs=$1
  (( $# == 1 )) || die "no arguments: PYTHON, TORCH_VERSION, TORCH_INDEX, MAX_JOBS and SKIP are environment variables" 2
  root=$(cd -P "$launch_dir/.." && pwd)
  logs=$root/.cache/build
  venv=$root/.venv
  python=$venv/bin/python
  jobs=${MAX_JOBS:-8}
  mkdir -p "$logs"
  cd "$root" || die "no folder $root"
  # The site's setup names files after the job; outside of one there is none.
  export SLURM_JOB_ID=${SLURM_JOB_ID:-build}
  site_setup
  # HIP_PLATFORM: where nvcc is also found, hipcc would build for NVIDIA and say nothing. No GPU need be visible, so
  # the architectures and DeepSpeed's accelerator are named.
  export HIP_PLATFORM=amd PYTORCH_ROCM_ARCH=$build_archs GPU_ARCHS=$build_archs DS_ACCELERATOR=cuda MAX_JOBS=$jobs
  export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
  if [[ -n ${ROCM_PATH:-} ]]; then export ROCM_HOME=$ROCM_PATH; fi
  check_tools
  make_python
  # For every make: each of its targets looks after the environment first.
  made=(DEVICE=rocm PYTHON="$base_python" TORCH_VERSION="$build_torch" TORCH_INDEX="$index")
  say "1/5 .venv, torch $build_torch, DeepSpeed and its ops (make setup; its logs are in .cache/setup)"
  make setup "${made[@]}"
  check_torch
  step 2/5 apex "$build_apex" build_apex
  step 3/5 flash "$build_flash" build_flash
  say "4/5 own kernels for $build_archs"
  make kernels "${made[@]}" KERNELS="cpu rocm" ARCHS="$build_archs"
  say "5/5 doctor --strict"
  "$python" -m megatron_port doctor --strict --device rocm --set engine=deepspeed \
    || die "something would be slow, or be built at run time: see the lines with ! above"
  say "ready: $venv. For many nodes: tar -C .venv -cf env.tar . (docs/frontier.md)"
}

check_tools() {
  local tool version
  for tool in git make hipcc; do
    command -v "$tool" > /dev/null || die "no $tool here, with the modules of launch/sites/$site_name.sh loaded"
  done
  # hipcc prints: HIP version: 7.1.25424-…
  version=$(hipcc --version | sed -n 's/^HIP version: *\([0-9]*\.[0-9]*\).*/\1/p' | head -n 1) || version=
  [[ -n $version ]] || die "hipcc --version names no HIP version; is $(command -v hipcc) ROCm's?"
  hip=$version
  index=${TORCH_INDEX:-https://download.pytorch.org/whl/rocm$hip}
  say "$(command -v hipcc), HIP $hip; torch from $index"
}

make_python() {  # an interpreter of 3.10 to 3.14 with venv: PYTHON, else one of conda's own in .python
  base_python=${PYTHON:-$root/.python/bin/python}
  [[ -z ${PYTHON:-} && ! -x $base_python ]] || return 0
  command -v conda > /dev/null || die "no conda here to make a Python with; set PYTHON=/path/to/python3.12"
  say "Python 3.12 in .python"
  logged python conda create -y -p "$root/.python" -c conda-forge python=3.12
}

check_torch() {  # what the other steps compile against
  torch=$("$python" -c 'import torch; print(torch.__version__, torch.version.hip or "none")') \
    || die "torch does not import, see above"
  local built=${torch#* }
  [[ $built != none ]] || die "torch ${torch% *} has no HIP: set TORCH_INDEX to a ROCm index or folder"
  if [[ $built != "$hip".* ]]; then
    [[ ${built%%.*} == "${hip%%.*}" ]] || die "torch ${torch% *} is built for ROCm $built and hipcc is of $hip: \
take the module of torch's ROCm (configs/clusters/$site_name.toml, then megatron-port launch sites), or TORCH_INDEX"
    say "torch is built for ROCm $built, hipcc is of $hip"
  fi
}

logged() {  # NAME COMMAND…: output to a log, whose end is shown on failure
  local name=$1
  shift
  if ! "$@" > "$logs/$name.log" 2>&1 < /dev/null; then
    tail -n 25 "$logs/$name.log" >&2
    die "$name failed: $*; all of it is in $logs/$name.log. No network on this node? docs/frontier.md has the proxy"
  fi
}

step() {  # NUMBER NAME PIN FUNCTION: skip what was asked to be skipped, or was made from the same things
  local stamp=$venv/stamps/build-$2 key="$3 $build_archs torch $torch hip $hip"
  if [[ " ${SKIP:-} " == *" $2 "* ]]; then say "$1 $2: skipped (SKIP)"; return 0; fi
  if [[ -r $stamp && $(< "$stamp") == "$key" ]]; then say "$1 $2: ready"; return 0; fi
  say "$1 $2 at $3, $jobs compilers at once"
  "$4"
  mkdir -p "$venv/stamps"
  printf '%s\n' "$key" > "$stamp.tmp"
  mv "$stamp.tmp" "$stamp"
}

sources() {  # NAME URL PIN: a clean checkout in $logs/NAME
  local place=$logs/$1
  if [[ ! -d $place/.git ]]; then
    rm -rf "$place"
    logged "$1-clone" git clone "$2" "$place"
  fi
  logged "$1-fetch" git -C "$place" fetch --tags origin
  logged "$1-checkout" git -C "$place" checkout --force --detach "$3"
}

install() {  # NAME FOLDER [VARIABLE=VALUE…]
  local name=$1 folder=$2
  shift 2
  logged "$name" env "$@" "$python" -m pip install -v --no-cache-dir --no-build-isolation --no-deps --force-reinstall \
    "$folder"
}

build_apex() {  # ROCm's apex compiles at first use what was not built here, and a skipped op is no error to its setup
  sources apex https://github.com/ROCm/apex "$build_apex"
  install apex "$logs/apex" APEX_BUILD_CPP_OPS=1 APEX_BUILD_CUDA_OPS=1
  (cd "$logs" && "$python" -c \
    'from apex.git_version_info_installed import installed_ops as o; assert o["amp_C"] and o["fused_layer_norm_cuda"], o') \
    || die "apex was installed without amp_C or fused_layer_norm_cuda; $logs/apex.log says why it skipped them"
}

build_flash() {  # BUILD_TARGET=rocm without the Triton switch is the Composable Kernel build: hours
  sources flash https://github.com/Dao-AILab/flash-attention "$build_flash"
  logged flash-kernels git -C "$logs/flash" submodule update --init csrc/composable_kernel
  install flash "$logs/flash" BUILD_TARGET=rocm FLASH_ATTENTION_FORCE_BUILD=TRUE
  (cd "$logs" && "$python" -c 'import torch, flash_attn_2_cuda') \
    || die "flash-attn was installed and its extension does not load, see above and $logs/flash.log"
}
