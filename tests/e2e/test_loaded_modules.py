"""Modules of the package that a plain training run loads in each rank: what a reader of a step may have to know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 170
"""A goal of 110 is still far; see benchmarks/evidence/decisions.md. The number only gets smaller."""
HOOK = '''
import sys
from pathlib import Path
from megatron_port.core.registry import LOOP_HOOKS
from megatron_port.core.train.hooks import LoopHook

class Modules(LoopHook):
    def finish(self, ending):
        names = sorted(n for n in sys.modules if n.split(".")[0] == "megatron_port" or n == "torch._dynamo")
        (Path(__file__).parent / f"rank-{self.state.session.info.rank}.txt").write_text("\\n".join(names))

LOOP_HOOKS.add("modules", Modules)
'''


def test_a_plain_run_loads_few_modules(tmp_path: Path) -> None:
    """On tp 2 × pp 2 × dp 2; none of the planner, of other systems' formats and of commands that are not ``train``.

    Nor torch's compiler, which takes as long to import as all the rest of torch: one line that imports a module of
    masks brings it into every rank.
    """
    (tmp_path / "loaded_modules.py").write_text(HOOK)
    settings = {
        "plugins": '["loaded_modules"]', "training.hooks": '["modules"]', "data.synthetic": "true",
        "training.steps": "1", "layout.tensor_parallel_size": "2", "layout.pipeline_parallel_size": "2",
        "model.num_layers": "2", "backend.device": '"cpu"', "output_dir": f'"{tmp_path}"',
    }
    command = [sys.executable, "-m", "megatron_port", "train", "models/gpt-tiny", "--nproc", "8"]
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
    )
    assert done.returncode == 0, done.stderr
    loaded = [set((tmp_path / f"rank-{rank}.txt").read_text().splitlines()) for rank in range(8)]
    tools = {name for names in loaded for name in names if name.startswith("megatron_port.tools.")}
    others = ("interop", "compress", "inference", "parity", "tune", "bench")
    foreign = {name for name in tools if name.split(".")[2] in others}
    assert not foreign
    assert not any("torch._dynamo" in names for names in loaded)
    assert max(map(len, loaded)) <= MOST, "\n".join(sorted(loaded[0]))
