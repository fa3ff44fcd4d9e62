"""The numerics' tests on a processor without AVX-512: torch, MKL, oneDNN and the own library held to AVX2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_port.core.io.variables import CPU_LEVEL
from megatron_port.ext.kernels.cpu_levels import cpu_levels, processor_flags

ROOT = Path(__file__).resolve().parents[2]
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", CPU_LEVEL: "v3"}
# pytest.main in a process that has seen that the switches hold.
CODE = """\
import sys, pytest, torch
from megatron_port.ext.kernels import kernels
found = torch.backends.cpu.get_cpu_capability(), kernels.load("cpu")
assert found == ("AVX2", "libmp_cpu-v3.so (cpu v3)"), found
sys.exit(pytest.main(sys.argv[1:]))
"""
FILES = ("unit/test_hf_logits.py", "kernels/test_norm.py", "kernels/test_softmax.py", "kernels/test_cross_entropy.py",
         "kernels/test_sums.py", "kernels/test_row_hashes.py")
CHOSEN = "test_logits or v3 or cpu and (values or gradient or norm or bits) and not opcheck and not twins"


def test_numerics_with_avx2_alone(own: Path) -> None:
    levels = cpu_levels(processor_flags(), "x86_64")
    if "v4" not in levels:
        pytest.skip("this processor has no more than AVX2: the other tests show it")
    command = [sys.executable, "-c", CODE, "-q", "-p", "no:cacheprovider", "-k", CHOSEN,
               *(str(ROOT / "tests" / f) for f in FILES)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env={**environment, **AVX2, "PREBUILT_KERNELS": "1"},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-300:]
