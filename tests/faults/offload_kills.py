"""SIGKILL of a rank in the middle of a write of offloaded state: the run resumes from its last checkpoint to the bit.

The state's files are scratch, so what was half written must not matter. A *chain* is one run that is killed and started
again until it is done; its losses and its last checkpoint must be those of a run that nobody touched. Run with
``python tests/faults/offload_kills.py --times 30 --out FILE`` (resumable).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import Commands
from small_runs import Layout, Run, resumed_at, trajectory

STEPS = 12
START_S = 300.0
LAYOUT = Layout(dp=2)
PLUGIN = '''
"""Kills a rank when half of its nth write of offloaded state has been written; kill.json says whom and when."""
import json, os, pathlib, signal
import torch.distributed as dist
from megatron_port.ext.memory import offload
HERE = pathlib.Path(__file__).parent
real, writes = offload.StateFile.write, []
def write(file, offset, memory):
    writes.append(offset)
    want, mine = json.loads((HERE / "kill.json").read_text()), dist.get_rank()
    if mine == want["rank"] and len(writes) == want["write"]:
        real(file, offset, memory[: len(memory) // 2 // 4096 * 4096])
        (HERE / "fired").write_text(str(len(memory)))
        os.kill(os.getpid(), signal.SIGKILL)
    real(file, offset, memory)
    (HERE / f"writes-{mine}").write_text(str(len(writes)))
offload.StateFile.write = write
'''


@dataclass
class FlushKill:
    """One kill; a line of the results file."""

    seed: int
    rank: int
    write: int
    """Which write of this start, from 1."""
    committed: int
    """Newest whole checkpoint when all was down."""
    resumed: int
    """Where the next start resumed."""
    chain: int
    ok: bool = False
    """It resumed there, and its chain ended as the run that nobody touched."""


class Flushes:
    """Runs whose state is on a disk, in one folder."""

    def __init__(self, commands: Commands, home: Path, hook: Path) -> None:
        self.commands, self.home, self.hook = commands, home, hook
        self.sets = (
            "checkpoint.save_interval=2", "checkpoint.keep=2", "checkpoint.resume=auto", "precision.dtype=bf16",
            "checkpoint.asynchronous=false", "offload.optimizer=nvme", f"offload.nvme_path={home / 'nvme'}",
            "offload.buffers=2", "layout.reduce_bucket_size=100000", 'plugins=["flush_kill"]',
        )
        self.whole = self.run("whole")
        self.start(self.whole, rank=-1, write=0)
        self.rows = trajectory(self.whole.steps_done())
        assert list(self.rows) == list(range(1, STEPS + 1)), sorted(self.rows)
        self.writes_per_step = int((hook / "writes-0").read_text()) // STEPS

    def run(self, name: str) -> Run:
        """Return a run of its own folder."""
        return Run(self.home, name, LAYOUT, *self.sets, steps=STEPS)

    def start(self, run: Run, *, rank: int, write: int) -> tuple[bool, str]:
        """Start or resume a run with a kill planned; return whether the kill came, and the output."""
        (self.hook / "kill.json").write_text(json.dumps({"rank": rank, "write": write}))
        (self.hook / "fired").unlink(missing_ok=True)
        command = self.commands.start(*run.command())
        try:
            code = command.wait(START_S)
            fired = (self.hook / "fired").exists()
            assert (code != 0) == fired, command.output()[-4000:]
            assert command.all_down(30.0) is not None, "processes stayed behind"
            return fired, command.output()
        finally:
            command.end()

    def chain(self, number: int, seeds: list[int]) -> list[FlushKill]:
        """Kill one run again and again, a seed each time, until it is done; judge it."""
        run, out = self.run(f"broken-{number}"), list[FlushKill]()
        while True:
            r = random.Random(f"flush-{seeds[0] if seeds else 'none'}")
            rank, write = (r.randrange(LAYOUT.ranks), r.randint(1, 4 * self.writes_per_step)) if seeds else (-1, 0)
            fired, output = self.start(run, rank=rank, write=write)
            if out:
                out[-1].resumed = resumed_at(output) or 0
            if not fired:
                break
            out.append(FlushKill(seeds.pop(0), rank, write, run.committed(), -1, number))
        same = trajectory(run.steps_done()) == self.rows and self._same_checkpoint(run)
        left = list((self.home / "nvme").iterdir())
        for kill in out:
            kill.ok = same and kill.resumed == kill.committed and not left
        return out

    def _same_checkpoint(self, run: Run) -> bool:
        last = [str(r.checkpoints / f"step-{STEPS:08d}") for r in (run, self.whole)]
        code, output = self.commands.run("checkpoint", "diff", *last, "--kind", "all")
        return code == 0 and bool(re.search(r"^0 of \d+ tensors differ", output, re.M))


def main() -> int:
    """Kill so many times, append a line each to a file, skip what is in it; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no chain after this; resume later")
    args = parser.parse_args()
    done = {json.loads(line)["seed"] for line in args.out.read_text().splitlines()} if args.out.exists() else set()
    seeds, started, bad, number = [s for s in range(args.times) if s not in done], time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory(prefix="flushes-") as scratch:
        hook = Path(scratch) / "hook"
        hook.mkdir()
        (hook / "flush_kill.py").write_text(PLUGIN)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH")]))
        with Commands(Path(scratch) / "logs") as commands:
            flushes = Flushes(commands, Path(scratch), hook) if seeds else None
            while flushes is not None and seeds and time.monotonic() - started < args.seconds:
                number += 1
                for kill in flushes.chain(number, seeds):
                    bad += not kill.ok
                    with args.out.open("a") as file:
                        file.write(json.dumps(asdict(kill)) + "\n")
                    print(kill, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
