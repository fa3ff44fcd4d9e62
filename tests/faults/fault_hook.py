"""Faults in a chosen rank at a chosen step, from outside of the package: no test code and no switch is in it.

``write_hook(folder, …)`` makes a folder for PYTHONPATH with a module ``fault_in_loop`` that patches
``megatron_port.core.train.loop`` when a process imports it. What to do is in ``fault.json`` beside it; ``fired`` is
written the moment it happens.
"""

from __future__ import annotations

import json
from pathlib import Path

FAULT = '''
import ctypes, json, os, pathlib, re, signal, time
from megatron_port.core.train import loop
def fire(here): (pathlib.Path(here) / "fired").write_text(json.dumps([time.time(), os.getpid()]))
def hubs():
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            ours = os.getsid(int(path.name)) == os.getsid(0)
            words = (path / "cmdline").read_bytes().split(bytes(1))
            if ours and b"megatron_port.run.watch.hub" in words: found.append(int(path.name))
        except OSError: pass
    return found
def end_hub(how, here):
    """End or stop the watch's process, wait for the next one, then stop this rank."""
    old = hubs()
    for pid in old: os.kill(pid, how)
    until = time.time() + 40
    while time.time() < until and not set(hubs()) - set(old): time.sleep(0.1)
    time.sleep(3)
    fire(here)
    os.kill(os.getpid(), signal.SIGSTOP)
def connect(want, here):
    """Stop in the first collective of all, that of the first communicator."""
    import torch.distributed as dist
    real = dist.all_reduce
    def broken(*args, **kwargs):
        dist.all_reduce = real
        if dist.get_rank() == want["rank"]:
            time.sleep(want["dwell"])
            fire(here)
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*args, **kwargs)
    dist.all_reduce = broken
def act(kind, want):
    import torch, torch.distributed as dist
    if kind == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "sleep": time.sleep(1000)
    elif kind == "hub-killed": end_hub(signal.SIGKILL, want["here"])
    elif kind == "hub-stopped": end_hub(signal.SIGSTOP, want["here"])
    elif kind == "deadlock": dist.barrier()
    elif kind == "segfault": ctypes.string_at(0)
    elif kind == "exit": os._exit(0)
    elif kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "gil": re.match("(a+)+$", "a" * 60 + "b")  # holds Python's lock for years
    elif kind == "memory":
        (pathlib.Path(want["group"]) / "cgroup.procs").write_text(str(os.getpid()))
        held = []
        while True: held.append(b"x" * (4 << 20))
    elif kind == "flip":
        zero = want["engine"].engine.optimizer
        flat = zero.single_partition_of_fp32_groups[0]
        zero.optimizer.state[flat]["exp_avg"].view(-1).view(torch.int32)[5] ^= 1 << 12
    elif kind == "error":
        from megatron_port.core.errors import PortError
        raise PortError("a fault of this rank alone")
    elif kind == "bug": raise KeyError("a bug of this rank alone")
    else: raise AssertionError(kind)
def install(here):
    want = {**json.loads((pathlib.Path(here) / "fault.json").read_text()), "here": here}
    if want["kind"] == "connect": return connect(want, here)
    step = loop.Loop._step
    def with_fault(self):
        state = self.state
        if state.progress.step == want["step"] and state.session.info.rank == want["rank"] and want["kind"]:
            real = state.loaders.train.step
            def broken(*args):
                time.sleep(want["dwell"])
                fire(here)
                act(want["kind"], {**want, "engine": state.engine})
                return real(*args)
            state.loaders.train.step = broken
        elif state.progress.step == want["step"] and want["kind"] == "deadlock":
            late = state.loaders.train.step
            state.loaders.train.step = lambda *args: (time.sleep(2 * want["dwell"]), late(*args))[1]
        if want["slow"] and state.session.info.rank == want["rank"] and state.progress.step == 2:
            stage, forward = state.engine.stage, state.engine.stage.forward
            stage.forward = lambda *args: (time.sleep(want["slow"]), forward(*args))[1]
        step(self)
    loop.Loop._step = with_fault
install(str(pathlib.Path(__file__).parent))
'''


def write_hook(
    folder: Path, *, kind: str, rank: int, step: int, dwell: float = 1.5, slow: float = 0.0, group: str = ""
) -> Path:
    """A folder to put in front of PYTHONPATH.

    Args:
        kind: see ``act``; empty: none.
        rank, step: whose loader does it, after so many steps.
        dwell: seconds in the loader before it happens: longer than a heartbeat, so that the watch knows of the phase.
            Before a deadlock the other ranks take twice as long: of two ranks the one that stood still first is named,
            and a heartbeat that comes late makes that moment a fraction of a second later.
        slow: seconds that this rank sleeps in each forward pass.
        group: folder of a control group with little memory, which ``memory`` joins before it takes more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fault_in_loop.py").write_text(FAULT)
    want = {"kind": kind, "rank": rank, "step": step, "dwell": dwell, "slow": slow, "group": group}
    (folder / "fault.json").write_text(json.dumps(want))
    return folder
