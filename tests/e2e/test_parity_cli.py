"""``parity`` as a user runs it on a machine of their own, without a GPU and in half precision."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

RUN_FILE = """
name = "run"
engine = "native"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
vocab_size = 300
seq_length = 16
hidden_dropout = 0.1
[batch]
micro_batch_size = 2
global_batch_size = 4
[precision]
dtype = "bf16"
[optimizer]
lr = 1e-2
[data]
synthetic = true
tokenizer = "byte"
[backend]
device = "cpu"
attention = "math"
"""
LAYOUTS = ("tp1pp1dp1", "tp2pp1dp1sp")


def test_layouts_in_bf16_are_one_process_that_rounds_there(tmp_path: Path) -> None:
    """Far within their tolerance: what reordering sums changes is no measure of what is left."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_port", "parity", "run.toml", "--layouts", *LAYOUTS], cwd=tmp_path,
        capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall("^running (.*)", done.stdout, re.MULTILINE) == [
        *LAYOUTS, "one process that rounds where tp2pp1dp1sp does", "one process with its sums in eight other orders"]
    assert done.stdout.count("EQUAL within tolerance") == len(LAYOUTS) and "DIFFERS" not in done.stdout
    found = re.findall(r"^  gradient +(\S+)  bound +(\S+)", done.stdout, re.MULTILINE)
    assert len(found) == len(LAYOUTS)
    for value, bound in found:
        assert float(value) <= 1e-4 < 1e-2 < float(bound), done.stdout
