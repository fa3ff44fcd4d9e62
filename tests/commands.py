"""``megatron-port`` commands forked from a process that has imported torch, for tests that start hundreds of them.

A fresh interpreter needs seconds to import torch; a fork of one that has needs milliseconds. The *server* (this file,
run as a program) imports what ``train`` imports, runs no operator, starts no thread, and forks a child for each
command line that it is sent. The child leads a session of its own, writes to a log, and calls ``cli.main.main`` as the
real command does, so that ``train --nproc`` forks its ranks from there:

    test ── pipe ──► server ── fork ──► megatron-port train --nproc 3 ── fork ──► rank 0, 1, 2

A server of another program (``Program``) serves what else is started often, such as pytest in a copy of the tree.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = ("torch", "torch._dynamo", "torch.distributed", "megatron_port.cli.main", "megatron_port.cli.train",
           "megatron_port.cli.checkpoint", "megatron_port.run.local_ranks", "megatron_port.run.loading",
           "megatron_port.run.trainer", "megatron_port.tools.plan.guard", "megatron_port.tools.plan.fastest",
           "megatron_port.run.leasing", "megatron_port.run.watch.client", "megatron_port.run.watch.hub_process",
           "megatron_port.run.watch.wire")


@dataclass(frozen=True)
class Program:
    """What a server imports before it forks, and the function that a fork calls with its arguments: → exit code."""

    preload: tuple[str, ...]
    module: str
    function: str


OURS = Program(PRELOAD, "megatron_port.cli.main", "main")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "SLURM_", "TORCHELASTIC_", "PMI_", "OMPI_",
             "PMIX_", "FLUX_", "PALS_", "JSM_", "MV2_", "MVP_")
START_TIMEOUT_S = 120.0
POLL_S = 0.002


@dataclass
class Command:
    """A command that was started; it leads a session of its own."""

    server: Commands
    pid: int
    log: Path
    started: float
    code: int | None = None
    """Exit code; negative: the signal that ended it; None: it runs."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        self.server.collect()
        return self.code

    def wait(self, seconds: float) -> int:
        """The exit code. Raises AssertionError with the log when time runs out."""
        until = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > until:
                raise AssertionError(f"process {self.pid} did not end within {seconds:g} s\n{self.output()[-4000:]}")
            time.sleep(POLL_S)
        assert self.code is not None
        return self.code

    def output(self) -> str:
        """Both streams so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def ranks(self, count: int) -> list[int]:
        """Process ids of its first ``count`` children in the order of their start; fewer while it starts."""
        try:
            found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except OSError:
            return []
        return sorted(map(int, found))[:count]

    def living(self) -> list[int]:
        """Processes of its session that run, itself included."""
        return session_members(self.pid)

    def all_down(self, seconds: float) -> float | None:
        """Seconds until no process of the session was left; None if some still were after ``seconds``."""
        begun = time.monotonic()
        while self.living():
            if time.monotonic() - begun > seconds:
                return None
            time.sleep(0.01)
        return time.monotonic() - begun

    def end(self) -> None:
        """Kill what is left of the session."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """Living processes (no zombies) of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry))
    return found


class Commands:
    """The handle of a server, for any number of threads. A context manager; leaving it kills what still runs."""

    def __init__(self, folder: Path, program: Program = OURS, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self._started: dict[int, Command] = {}
        self._count = 0
        self._lock = threading.Lock()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        environment = {
            **kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]), **(env or {}),
        }
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, program.module, program.function, *program.preload], env=environment,
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0,
            )
        self._buffer = b""
        greeting = self._message(START_TIMEOUT_S)
        if greeting != {"ready": True}:
            self.close()
            raise RuntimeError(f"the server did not start: {greeting}\n{(folder / 'server.log').read_text()[-3000:]}")

    def start(self, *argv: str, env: dict[str, str] | None = None, cwd: Path = ROOT, load: str = "") -> Command:
        """Fork the program with ``argv`` in ``cwd``; ``env`` joins the environment, its PYTHONPATH sys.path too.

        ``load``: a module that the process imports first.
        """
        with self._lock:
            self._count += 1
            log = self.folder / f"command-{self._count:04d}.log"
            assert self._process.stdin is not None
            request = {"argv": argv, "log": str(log), "env": env or {}, "cwd": str(cwd), "load": load}
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            while True:
                message = self._message(30.0)
                if message is None:
                    raise RuntimeError("the server does not answer")
                if "started" in message:
                    break
                self._note_end(message)
            command = Command(self, int(message["started"]), log, time.monotonic())
            self._started[command.pid] = command
            return command

    def run(self, *argv: str, seconds: float = 120.0, env: dict[str, str] | None = None) -> tuple[int, str]:
        """Exit code and output of a command that ends by itself."""
        command = self.start(*argv, env=env)
        try:
            return command.wait(seconds), command.output()
        finally:
            command.end()

    def collect(self) -> None:
        """Take note of the commands that have ended."""
        with self._lock:
            while (message := self._message(0.0)) is not None:
                self._note_end(message)

    def _note_end(self, message: dict[str, Any]) -> None:
        self._started.pop(int(message["ended"])).code = int(message["code"])

    def _message(self, seconds: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the server and everything that it started."""
        for command in list(self._started.values()):
            command.end()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------- in the server


def _command(argv: list[str], log: str, load: str, module: str, function: str) -> NoReturn:
    """The child: a session leader whose life is one command."""
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
            os.dup2(source, target)
        os.closerange(3, 64)
        if load:
            importlib.import_module(load)
        code = int(getattr(importlib.import_module(module), function)(argv))
    except BaseException:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _serve(module: str, function: str, preload: Sequence[str]) -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # the reason is in distributed/pool.py
    for name in preload:
        importlib.import_module(name)
    if module == OURS.module:
        _load_kernels()
    gc.collect()
    gc.freeze()  # a child's collector must not touch, and so copy, what all share
    tasks = len(os.listdir("/proc/self/task"))
    _say({"ready": True} if tasks == 1 else {"error": f"{tasks} threads after the imports; forks could deadlock"})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alive: set[int] = set()
    while True:
        ready, _, _ = select.select([0], [], [], 0.02 if alive else None)
        if ready:
            line = _line()
            if not line:
                break
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.chdir(request["cwd"])
                os.environ.update(request["env"])
                sys.path[1:1] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
                _command(request["argv"], request["log"], request["load"], module, function)
            alive.add(pid)
            _say({"started": pid})
        while alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            alive.discard(pid)
            _say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})
    for pid in alive:
        for member in session_members(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)


def _load_kernels() -> None:
    from megatron_port.core.errors import EnvironmentFault
    from megatron_port.ext.kernels import kernels

    with contextlib.suppress(EnvironmentFault):
        kernels.load("cpu")


def _line() -> bytes:
    """One request, unbuffered: a child that is forked must not inherit half of the next one."""
    out = b""
    while not out.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        out += byte
    return out


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], sys.argv[3:])
