"""A fork server of gloo ranks for the distributed tests.

Importing torch costs seconds and forking costs milliseconds, so one *server*
process imports torch (and, for the second kind of server, deepspeed), runs no
operator and starts no thread, and forks ranks when a test asks for them:

    pytest ── socket ──► server ── fork ──► rank 0 … rank N-1
       ▲                                        │
       └───── one Unix socket for each rank ────┘

``RankPool.run(4, fn, x)`` calls the module-level function ``fn(x)`` on four ranks
with the default process group up and returns their results in rank order. Ranks
of a world stay alive (stopped) between tests, unless the test failed, timed out, or asked for
``fresh=True``; ``deepspeed=True`` is always fresh, because DeepSpeed keeps module
globals. A rank's output goes to a log, whose end is part of a failure's message.

Ranks see no GPU, one thread, and only the loopback interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import pickle
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
GROUP_TIMEOUT_S = 300.0
LAST_WORDS_S = 2.0
"""After the first failure the others may report theirs for this long; then the world is killed."""
PRELOAD = ("core", "ext", "run", "tools.parity", "tools.interop")
"""Packages that the server imports whole ahead of forking."""
LATE = ("torch.profiler._cupti_monitor", "safetensors.torch", "pytest")
"""Modules that every rank would import while it runs."""
LATE_IN_DEEPSPEED = ("deepspeed.comm.mori", "deepspeed.module_inject.auto_ep_layer", "deepspeed.moe.ep_repack",
                     "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.utils.pin_memory")
"""Modules that DeepSpeed would import in every rank, when it makes its engine."""


class RankFailed(AssertionError):
    """A function raised, died or timed out on a rank.

    ``rank`` is the first that failed and ``error_type`` the class name of its
    exception (``Timeout`` or ``Died`` if there was none). If the exception could be
    pickled, it is ``__cause__``.
    """

    def __init__(self, message: str, *, rank: int, error_type: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.error_type = error_type


# ---------------------------------------------------------------- messages


def _send(link: Connection, message: tuple[Any, ...]) -> None:
    """Send by plain pickle: multiprocessing's own would share tensors by file descriptor, and start threads."""
    link.send_bytes(pickle.dumps(message))


def _receive(link: Connection) -> tuple[Any, ...]:
    """The counterpart of :func:`_send`; EOFError when the other side is gone."""
    return pickle.loads(link.recv_bytes())  # type: ignore[no-any-return]


# ---------------------------------------------------------------- in a rank


def _load_function(module: str, file: str, qualname: str, path: list[str]) -> Callable[..., Any]:
    """The test's function, imported under the name that the test process knows it by."""
    sys.path[:] = path
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
                raise
            spec = importlib.util.spec_from_file_location(module, file)  # pytest's importlib mode
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            sys.modules[module] = loaded
            spec.loader.exec_module(loaded)
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _pickled_error(error: BaseException) -> bytes | None:
    """The exception in a form that survives the way back, or None."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _start_group(rank: int, world_size: int, port: int, listen_fd: int) -> None:
    """Bring up the default gloo group on a store whose socket is bound to 127.0.0.1 already."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=GROUP_TIMEOUT_S)
    server = {"is_master": True, "master_listen_fd": listen_fd} if rank == 0 else {"is_master": False}
    store = dist.TCPStore("127.0.0.1", port, world_size, timeout=limit, wait_for_workers=False, **server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def _reset_globals() -> None:
    """Undo the settings of torch that a test may have changed."""
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the setter imports seconds' worth of torch
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)


def _share_gloo_device() -> None:
    """Let all gloo groups of this process use one device. Each would make its own, with a thread that looks at its
    sockets a hundred times a second: a fourteenth of the CPU time of eight ranks with ten groups."""
    from torch.distributed import distributed_c10d

    real: Any = distributed_c10d.ProcessGroupGloo
    device = real.create_default_device()

    class Shared(real):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta | None = None) -> None:
            own = real._Options()
            own._devices, own._threads = [device], 2
            if timeout is not None:
                own._timeout = timeout
            super().__init__(store, rank, size, own)

    distributed_c10d.ProcessGroupGloo = Shared  # type: ignore[misc]


def _rank_main(rank: int, world_size: int, port: int, listen_fd: int, address: str, key: bytes, log: str) -> NoReturn:
    """Life of a rank: connect to pytest, start the group, serve functions until the socket closes."""
    code = 0
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the server
        with open(log, "ab", buffering=0) as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )
        link = Client(address, authkey=key)
        link.send((rank, os.getpid()))
        _share_gloo_device()
        _start_group(rank, world_size, port, listen_fd)
        while True:
            try:
                module, file, qualname, path, packed = _receive(link)
            except EOFError:
                break
            try:
                function = _load_function(module, file, qualname, path)
                result = function(*pickle.loads(packed))  # only now: its classes may live in the test's module
                sys.stdout.flush()
                _send(link, ("ok", result))
            except BaseException as error:  # a failed test may also have called sys.exit
                sys.stdout.flush()
                _send(link, ("error", type(error).__name__, str(error), traceback.format_exc(), _pickled_error(error)))
            _reset_globals()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no atexit hooks, no destructors of a forked interpreter


# ---------------------------------------------------------------- in the server


def _preload(with_deepspeed: bool) -> None:
    """Import what every rank will want. A module that is broken fails again, visibly, in the rank."""
    import torch
    import torch._dynamo  # torch.optim wants it: 1.4 s, once here instead of once per rank
    import torch.distributed
    import torch.nn.functional  # noqa: F401

    import megatron_port

    if with_deepspeed:
        import deepspeed  # noqa: F401
        from deepspeed.pipe import PipelineModule  # noqa: F401

        from megatron_port.ext.deepspeed.prepare import prepare_deepspeed

        prepare_deepspeed()
    for name in (*LATE, *(LATE_IN_DEEPSPEED if with_deepspeed else ())):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for package in PRELOAD:
        module = importlib.import_module(f"{megatron_port.__name__}.{package}")
        for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
            if "deepspeed" in found.name and not with_deepspeed:
                continue
            with contextlib.suppress(Exception):
                importlib.import_module(found.name)
    from megatron_port.core.errors import EnvironmentFault
    from megatron_port.ext.kernels import kernels

    with contextlib.suppress(EnvironmentFault):
        kernels.load("cpu")


def _fork_world(link: Connection, world_size: int, address: str, key: bytes, log: str) -> list[int]:
    """Fork the ranks of one world; returns their process ids."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                link.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's; it then closes our socket
                if rank:
                    listener.close()
                _rank_main(rank, world_size, port, listener.detach() if rank == 0 else -1, address, key, log)
            pids.append(pid)
    return pids


def _serve(descriptor: int, with_deepspeed: bool) -> None:
    """Life of the server: fork and kill worlds until the test process goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = Connection(descriptor)
    # A rank that is interrupted while it sends holds a lock of gloo's, for which a thread of its own spins. Ranks that
    # do not interrupt one another as soon as a message wakes them spin half as often.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _preload(with_deepspeed)
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        link.send(f"the fork server has {tasks} threads after its imports; ranks forked from it could deadlock")
        return
    gc.collect()
    gc.freeze()
    link.send("ready")
    alive: set[int] = set()
    while True:
        try:
            command, *rest = link.recv()
        except EOFError:
            command, rest = "kill", [list(alive)]
            link = None  # type: ignore[assignment]
        if command == "fork":
            pids = _fork_world(link, *rest)
            alive.update(pids)
            link.send(pids)
        else:
            for pid in alive.intersection(rest[0]):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            alive.difference_update(rest[0])
        if link is None:
            return


# ---------------------------------------------------------------- in pytest


@dataclass
class _World:
    """Live ranks."""

    size: int
    pids: list[int]
    log: Path
    links: dict[int, Connection] = field(default_factory=dict)

    def signal(self, number: int) -> None:
        """To every rank. Between calls they are stopped: gloo's threads look at their sockets a hundred times a
        second, of which four idle worlds took a thirtieth of a core."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class _Server:
    """The handle of one server process."""

    def __init__(self, folder: Path, with_deepspeed: bool) -> None:
        self.folder = folder
        self.kind = "deepspeed" if with_deepspeed else "torch"
        self.worlds: dict[int, _World] = {}
        self.forked = 0
        self.key = os.urandom(16)
        ours, theirs = socket.socketpair()
        self.log = folder / f"server-{self.kind}.log"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
            # A run started in this process may have set it; pairs that connect lazily hang on a shared device.
            "TORCH_GLOO_LAZY_INIT": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        with theirs, open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(int(with_deepspeed))],
                pass_fds=[theirs.fileno()], env=environment, cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )
        self.link = Connection(ours.detach())
        try:
            greeting = self.link.recv() if self.link.poll(START_TIMEOUT_S) else f"no answer in {START_TIMEOUT_S:.0f} s"
        except EOFError:
            greeting = "it ended"
        if greeting != "ready":
            self.close()
            raise RuntimeError(f"the {self.kind} fork server did not start: {greeting}\n{_tail(self.log)}")

    def fork(self, size: int) -> _World:
        """A new world of ``size`` ranks, connected."""
        self.forked += 1
        name = f"{self.kind}-{self.forked}"
        log = self.folder / f"{name}-world{size}.log"
        address = str(self.folder / f"{name}.sock")
        with Listener(address, "AF_UNIX", backlog=64, authkey=self.key) as listener:
            self.link.send(("fork", size, address, self.key, str(log)))
            world = _World(size, self.link.recv(), log)
            listener._listener._socket.settimeout(START_TIMEOUT_S)  # type: ignore[attr-defined]
            for _ in range(size):
                link = listener.accept()
                rank, _pid = link.recv()
                world.links[rank] = link
        return world

    def kill(self, world: _World) -> None:
        """End a world's ranks, whatever they are doing."""
        for link in world.links.values():
            link.close()
        self.link.send(("kill", world.pids))
        if self.worlds.get(world.size) is world:
            del self.worlds[world.size]

    def close(self) -> None:
        """End the server; it kills its ranks when our socket closes."""
        for world in self.worlds.values():
            for link in world.links.values():
                link.close()
        self.link.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _tail(log: Path, size: int = 3000) -> str:
    """The end of a log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return f"--- end of {log.name} ---\n{text[-size:]}" if text else ""


class RankPool:
    """Runs module-level functions on worlds of gloo ranks. One a pytest session; see the module's docstring."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._servers: dict[bool, _Server] = {}

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 240.0,
        fresh: bool = False,
        deepspeed: bool = False,
    ) -> list[Any]:
        """Call ``fn(*args)`` on every rank; the results in rank order.

        ``fn`` must be reachable by name from its module; ``args`` and results must
        pickle (tensors do). ``timeout`` (seconds) covers the call, not the fork.
        ``fresh``: new ranks for this call only. ``deepspeed``: ranks that have
        deepspeed imported (implies fresh).

        Raises:
            RankFailed: ``fn`` raised on a rank, a rank died, or time ran out.
        """
        if "<" in fn.__qualname__:
            raise ValueError(f"{fn.__qualname__} is not reachable by name; ranks need a module-level function")
        server = self._servers.get(deepspeed)
        if server is None:
            server = self._servers[deepspeed] = _Server(self._folder, deepspeed)
        fresh = fresh or deepspeed
        world = None if fresh else server.worlds.get(world_size)
        if world is None:
            world = server.fork(world_size)
            if not fresh:
                server.worlds[world_size] = world
        file = str(Path(sys.modules[fn.__module__].__file__ or "").resolve())
        try:
            task = (fn.__module__, file, fn.__qualname__, list(sys.path), pickle.dumps(args))
            world.signal(signal.SIGCONT)
            return self._call(world, task, timeout)
        except BaseException:
            fresh = True
            raise
        finally:
            if fresh:
                server.kill(world)
            else:
                world.signal(signal.SIGSTOP)

    def _call(self, world: _World, task: tuple[Any, ...], timeout: float) -> list[Any]:
        """Send a task to every rank and collect the answers until a deadline."""
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[Any, ...]] = {}
        bad: list[int] = []
        for rank, link in world.links.items():
            try:
                _send(link, task)
            except OSError:
                bad.append(rank)
                answers[rank] = ("error", "Died", "the rank ended before the call", "", None)
        waiting = {link: rank for rank, link in world.links.items() if rank not in answers}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for link in [link for link in waiting if link in ready]:
                rank = waiting.pop(link)
                try:
                    answers[rank] = _receive(link)
                except (EOFError, OSError):
                    answers[rank] = ("error", "Died", "the rank's process ended", "", None)
                if answers[rank][0] == "error":
                    if not bad:
                        deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
                    bad.append(rank)
        if bad or waiting:
            self._fail(world, answers, bad, sorted(waiting.values()), timeout)
        return [answers[rank][1] for rank in range(world.size)]

    @staticmethod
    def _fail(
        world: _World, answers: dict[int, tuple[Any, ...]], bad: list[int], waiting: list[int], timeout: float
    ) -> NoReturn:
        """Raise what happened on the first rank that failed, the others in a line each."""
        if not bad:
            message = f"ranks {waiting} of {world.size} did not finish within {timeout:g} s\n{_tail(world.log)}"
            raise RankFailed(message, rank=waiting[0], error_type="Timeout")
        first = bad[0]
        _, kind, text, trace, pickled = answers[first]
        lines = [f"rank {first} of {world.size}: {kind}: {text}", trace.rstrip()]
        lines += [f"rank {rank}: {answers[rank][1]}: {answers[rank][2].splitlines()[:1]}" for rank in bad[1:]]
        if waiting:
            lines.append(f"ranks {waiting} had not returned (killed)")
        lines.append(_tail(world.log))
        cause = pickle.loads(pickled) if pickled else None
        raise RankFailed("\n".join(filter(None, lines)), rank=first, error_type=kind) from cause

    def close(self) -> None:
        """End all servers and ranks."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), bool(int(sys.argv[2])))
