"""Faults at a stated moment of a stated rank, from outside of the package: no test code and no switch is in it.

``write_moments(folder, …)`` makes a folder for PYTHONPATH with a module ``faults_at_moments`` that patches what ranks
tell of themselves (``core.dist.process.ProgressTracker``). Each fault strikes once: a file marks it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

FAULTS = '''
import json, os, pathlib, signal
from megatron_port.core.dist import process
HERE = pathlib.Path(__file__).parent
WANTED = json.loads((HERE / "moments.json").read_text())
def strike(n, want):
    try: os.close(os.open(HERE / f"struck-{n}", os.O_CREAT | os.O_EXCL))
    except FileExistsError: return
    if want["kind"] == "flip-copy":
        for path in sorted(pathlib.Path(want["folder"]).rglob(f"rank-{want['rank']:05d}.safetensors")):
            if path.parent.name == newest(want):
                data = bytearray(path.read_bytes()); data[-9] ^= 4
                with open(path, "r+b") as stream: stream.seek(len(data) - 9); stream.write(data[-9:-8])
    if want["kind"] == "tear-list":
        path = next(pathlib.Path(want["folder"]).rglob(newest(want))) / f"rank-{want['rank']:05d}.json"
        path.write_bytes(path.read_bytes()[:-7])
    if want["kind"] == "hub": return [os.kill(pid, signal.SIGKILL) for pid in hubs()]
    if want["kind"] == "bug": raise KeyError("a bug of this rank alone")
    if want["kind"] == "memory":
        (pathlib.Path(want["folder"]) / "cgroup.procs").write_text(str(os.getpid()))
        held = []
        while True: held.append(b"x" * (4 << 20))
    if want["kind"] == "power": [os.kill(pid, signal.SIGKILL) for pid in session() if pid != os.getpid()]
    os.kill(os.getpid(), signal.SIGSTOP if want["kind"] == "stop" else signal.SIGKILL)
def session():
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == os.getsid(0): yield int(path.name)
        except OSError: continue
def hubs():
    for pid in session():
        try: line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError: continue
        if b"megatron_port.run.watch.hub" in line.split(bytes(1)): yield pid
def newest(want):
    lists = pathlib.Path(want["folder"]).rglob(f"rank-{want['rank']:05d}.json")
    return max(lists, key=lambda p: p.stat().st_mtime_ns).parent.name
at = process.ProgressTracker.at
def told(self, phase, operation="", number=-1):
    at(self, phase, operation, number)
    rank = int(os.environ.get("RANK", "0"))
    for n, want in enumerate(WANTED):
        if want["kind"] == "flip-state" or rank != want["rank"] or self.step < want["step"]: continue
        if want["scope"] in ("", self.scope) and phase == want["phase"] and operation.startswith(want["operation"]):
            if want["after"] < 0 or (HERE / f"struck-{want['after']}").exists(): strike(n, want)
process.ProgressTracker.at = told
def flip_before_the_copy():
    import torch
    from megatron_port.run.copying import StateCopying
    act = StateCopying.act
    def with_flip(self):
        for n, want in enumerate(WANTED):
            here = want["rank"] == self.state.ctx.rank and self.state.progress.step == want["step"]
            if want["kind"] == "flip-state" and here and not (HERE / f"struck-{n}").exists():
                (HERE / f"struck-{n}").touch()
                piece = next(p for p in self.state.engine.state_pieces() if p.kind == "exp_avg")
                with torch.no_grad(): piece.tensor.view(torch.int32)[5] ^= 1 << 12
        act(self)
    StateCopying.act = with_flip
if any(want["kind"] == "flip-state" for want in WANTED): flip_before_the_copy()
'''


def moment(
    rank: int, step: int, phase: str, *, kind: str = "kill", scope: str = "", operation: str = "", folder: str = "",
    after: int = -1,
) -> dict[str, object]:
    """A fault: the rank, from which step on, in which phase, scope and operation (``core.dist.process``).

    ``after``: the fault, by its number, that must have struck before.
    ``kind``: kill | stop | bug | flip-copy (and kill) | tear-list (and kill); these two need the copies' folder |
    flip-state: a bit of a moment, before the copy of the step | hub: the watch's process is killed | memory: it takes
    more than the control group ``folder`` has, and the kernel kills it | power: all processes of the run are killed.
    """
    return {"rank": rank, "step": step, "phase": phase, "kind": kind, "scope": scope, "operation": operation,
            "folder": folder, "after": after}


def write_moments(folder: Path, moments: Sequence[dict[str, object]]) -> Path:
    """A folder to put in front of PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faults_at_moments.py").write_text(FAULTS)
    (folder / "moments.json").write_text(json.dumps(list(moments)))
    return folder


def struck(folder: Path) -> int:
    """How many of the faults have happened."""
    return len(list(folder.glob("struck-*")))
