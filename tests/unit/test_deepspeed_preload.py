"""What is imported before ranks are forked leaves CUDA to them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("build", ["torch.version.cuda = '13.0'", "torch.version.hip = '7.2'"])
def test_deepspeed_is_not_imported_before_a_fork_with_a_build_for_gpus(build: str) -> None:
    preload = "from megatron_port.ext.deepspeed import deepspeed_preload as _"
    code = f"import sys, torch; {build}; {preload}; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
