"""``parity`` as a user runs it on a machine of their own, without a GPU and in half precision."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LAYOUTS = ("tp1pp1dp1", "tp2pp1dp1sp")
SMALL = ("engine=native", "precision.dtype=bf16", "data.synthetic=true", "data.train=[]", "model.num_layers=2",
         "model.hidden_size=32", "model.seq_length=16", "model.hidden_dropout=0.1", "batch.global_batch_size=4",
         "batch.micro_batch_size=2")


def test_layouts_in_bf16_are_one_process_that_rounds_there(tmp_path: Path) -> None:
    """Far within their tolerance: what reordering sums changes is no measure of what is left."""
    changes = [word for change in SMALL for word in ("--set", change)]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_port", "parity", "runs/quickstart", "--layouts", *LAYOUTS, *changes],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall("^running (.*)", done.stdout, re.MULTILINE) == [
        *LAYOUTS, "one process that rounds where tp2pp1dp1sp does", "one process with its sums in eight other orders"]
    assert done.stdout.count("EQUAL within tolerance") == len(LAYOUTS) and "DIFFERS" not in done.stdout
    found = re.findall(r"^  gradient +(\S+)  bound +(\S+)", done.stdout, re.MULTILINE)
    assert len(found) == len(LAYOUTS)
    for value, bound in found:
        assert float(value) <= 1e-4 < 1e-2 < float(bound), done.stdout
