#!/bin/bash
# Build the environment on Frontier: launch/build_frontier.sh, on a login node or in a job (docs/frontier.md, section 1).
# The modules are those of configs/clusters/frontier.toml. The same command resumes where it stopped.
# Environment: PYTHON, TORCH_VERSION, TORCH_INDEX (URL or folder), MAX_JOBS, SKIP="apex flash".
set -euo pipefail

launch_dir=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=/dev/null
source "$launch_dir/sites/frontier.sh"
# shellcheck source=/dev/null
source "$launch_dir/common.sh"
# shellcheck source=/dev/null
source "$launch_dir/build_rocm.sh"
build_main gfx90a "$@"  # MI250X
