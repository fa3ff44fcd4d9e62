"""The processes that hold a private cluster; ``cluster.py`` starts ``python namespaces.py SPEC`` and talks to it.

::

    test process ── supervisor: in the host's namespaces; removes the directory and the control groups at the end
                     └─ outer init: own pid, net, uts, ipc and mount; bridge, munged, slurmctld; the login host
                         └─ one init a node: the same five again; hsn0, /tmp, /dev/shm, slurmd

A pid namespace ends with its init, whatever happens to anybody else, so SIGKILL of the outer init ends everything.
Commands come as JSON lines on stdin, one answer a line goes to stdout; the end of stdin is the end of the cluster.
Standard library only, one thread, Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 1 << 30
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x1000, 0x2000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONTROLLER_PORT, NODE_PORT = 6817, 6818
BRIDGE = "br0"
LINK = "hsn0"

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str = "none", flags: int = 0, data: str = "") -> None:
    arguments = [text.encode() for text in (source, target, kind)]
    _checked(
        _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None), f"mount {kind} {source} on {target}"
    )


def bind(source: str, target: str) -> None:
    mount(source, target, flags=MS_BIND | MS_REC)


def die_with_parent() -> None:
    _checked(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def ip(*lines: str) -> None:
    """``ip`` with all commands in one process."""
    done = subprocess.run(["ip", "-batch", "-"], input="\n".join(lines) + "\n", text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"ip: {done.stderr.strip()} in: {'; '.join(lines)}")


def below(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def place(source: str, target: str) -> None:
    """Bind ``source`` to ``target``, which is made first, as a file or a directory."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    bind(source, target)


def private_directory(directory: str, staging: str, keep: Sequence[str], mode: str = "1777") -> None:
    """An empty tmpfs over ``directory``, through which the paths of ``keep`` that lie below stay visible."""
    directory = os.path.realpath(directory)
    mount("tmpfs", staging, "tmpfs", data=f"mode={mode}")
    kept: list[str] = []
    for path in sorted(keep):
        if below(path, directory) and not any(path == other or below(path, other) for other in kept):
            place(path, staging + path[len(directory) :])
            kept.append(path)
    mount(staging, directory, flags=MS_MOVE)


def local_directory(path: str, staging: str) -> None:
    """An empty directory at a path that the host lacks: a tmpfs over the nearest parent shows all that was there."""
    parent = os.path.dirname(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    private_directory(parent, staging, [entry.path for entry in os.scandir(parent) if not entry.is_symlink()], "755")
    os.makedirs(path)


def private_view(spec: dict[str, Any], name: str) -> None:
    """The mounts of one host, login or node. Call it as pid 1 of a new pid, net, uts, ipc and mount namespace."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc")
    base, staging = spec["base"], spec["base"] + "/mnt"
    with contextlib.suppress(OSError):  # /sys/class/net of this host alone; where it may not, the real host's is shown
        mount("sysfs", staging, "sysfs")
        if os.path.isdir("/sys/fs/cgroup"):
            bind("/sys/fs/cgroup", staging + "/fs/cgroup")
        mount(staging, "/sys", flags=MS_MOVE)
    for directory in ("/tmp", "/dev/shm"):
        private_directory(directory, staging, spec["visible"])
    if spec["local"]:
        if os.path.isdir(spec["local"]):
            private_directory(spec["local"], staging, spec["visible"], "755")
        else:
            local_directory(spec["local"], staging)
    for file in ("hosts", "nsswitch.conf", "slurm"):
        bind(f"{base}/etc/{file}", f"/etc/{file}")
    socket.sethostname(name)


def spawn(argv: Sequence[str], log: str, directory: str) -> int:
    """A daemon in the foreground, as a child of this init. Returns its pid."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=directory,
            env={"PATH": PATH, "LANG": "C"},
            start_new_session=True,
        ).pid


def wait_until(ready: Callable[[], bool], what: str, pid: int, timeout: float = 60.0) -> None:
    """Until daemon ``what`` is ready; raises as soon as it is gone."""
    deadline = time.monotonic() + timeout
    while not ready():
        try:
            gone = os.waitpid(pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # subprocess was quicker: it reaps children whose Popen is gone
            gone = True
        if gone:
            raise RuntimeError(f"{what} did not start")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not ready after {timeout:g} s")
        time.sleep(0.003)


def answers(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(address) == 0


class Node:
    """The init of one node. ``run`` never returns."""

    def __init__(self, spec: dict[str, Any], node: dict[str, Any], generation: int) -> None:
        self.spec, self.node, self.generation = spec, node, generation
        self.slurmd = 0

    def run(self, ready: int, go: int) -> NoReturn:
        """``ready`` gets a byte when the namespaces exist, then ``go`` gives one when the link does."""
        code = 1
        try:
            os.setsid()
            for file in self.node["cgroup_files"]:
                Path(file).write_text("0")
            unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNS)
            os.write(ready, b"n")
            private_view(self.spec, self.node["name"])
            if not os.read(go, 1):
                raise RuntimeError("the outer init gave up")
            address = f"{self.node['address']}/{self.spec['prefix']}"
            ip("link set lo up", f"addr add {address} dev {LINK}", f"link set {LINK} up")
            signal.signal(signal.SIGHUP, lambda *_: self.start_slurmd())
            self.start_slurmd()
            os.write(ready, b"u")
            os.close(ready)
            os.close(go)
            self.reap()
        except BaseException:
            os.write(ready, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(code)

    def start_slurmd(self) -> None:
        if not self.slurmd:
            name = self.node["name"]
            self.slurmd = spawn(["slurmd", "-D"], f"{self.spec['base']}/log/slurmd.{name}.err", "/")

    def reap(self) -> NoReturn:
        while True:
            try:
                pid, _ = os.waitpid(-1, 0)
            except ChildProcessError:
                signal.pause()  # until SIGHUP asks for a slurmd
                continue
            if pid == self.slurmd:
                self.slurmd = 0


class Outer:
    """The outer init: the login host, its daemons, and the inits of the nodes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.by_name = {node["name"]: node for node in spec["nodes"]}
        self.pids: dict[str, int] = {}
        self.links: dict[str, str] = {}
        self.generation = 0
        self.daemons: dict[int, str] = {}

    def start(self) -> dict[str, Any]:
        """Bridge, munged and slurmctld."""
        base, login = self.spec["base"], self.spec["login"]
        private_view(self.spec, login["name"])
        address = f"{login['address']}/{self.spec['prefix']}"
        ip("link set lo up", f"link add {BRIDGE} type bridge", f"addr add {address} dev {BRIDGE}",
           f"link set {BRIDGE} up")  # fmt: skip
        run, log = f"{base}/run", f"{base}/log"
        munge = f"{run}/munge.socket"
        files = {"key-file": f"{base}/munge/key", "socket": munge, "pid-file": f"{run}/munged.pid"}
        files |= {"log-file": f"{log}/munged.log", "seed-file": f"{base}/munge/seed"}
        options = [f"--{name}={value}" for name, value in files.items()]
        munged = spawn(["munged", "--foreground", "--force", *options], f"{log}/munged.err", base)
        wait_until(lambda: answers(socket.AF_UNIX, munge), "munged", munged)
        slurmctld = spawn(["slurmctld", "-D"], f"{log}/slurmctld.err", log)
        wait_until(lambda: answers(socket.AF_INET, (login["address"], CONTROLLER_PORT)), "slurmctld", slurmctld)
        self.daemons = {munged: "munged", slurmctld: "slurmctld"}
        return {}

    def start_nodes(self, names: Sequence[str]) -> dict[str, Any]:
        """Start the inits, plug in their links, wait until each runs a slurmd. Answers their pids as seen here."""
        starting, lines = {}, []
        for name in names:
            self.generation += 1
            node = self.by_name[name]
            shutil.rmtree(f"{self.spec['base']}/spool/{name}", ignore_errors=True)  # a node's disk does not survive
            starting[name] = self._fork(node)
        for name, (pid, ready, _) in starting.items():
            self._expect(ready, b"n", name)
            self.generation += 1
            link = self.links[name] = f"v{self.generation}"
            self.pids[name] = pid
            lines += [f"link add {link} type veth peer name {LINK} netns {pid}", f"link set {link} master {BRIDGE} up"]
        ip(*lines)
        for _, _, go in starting.values():
            os.write(go, b"g")
        for name, (_, ready, go) in starting.items():
            self._expect(ready, b"u", name)
            os.close(ready)
            os.close(go)
        return {"pids": {name: self.pids[name] for name in names}, "links": {name: self.links[name] for name in names}}

    def _fork(self, node: dict[str, Any]) -> tuple[int, int, int]:
        """(pid of the node's init, pipe that says how far it is, pipe that lets it go on)."""
        ready, tell = os.pipe()
        listen, go = os.pipe()
        pids, say = os.pipe()
        middle = os.fork()
        if middle == 0:
            # Only children of this one live in the new pid namespace, and pid 1 of ours adopts the init when it exits.
            try:
                for handled in (signal.SIGCHLD, signal.SIGHUP):
                    signal.signal(handled, signal.SIG_DFL)
                signal.set_wakeup_fd(-1)
                quiet = os.open(os.devnull, os.O_RDWR)
                os.dup2(quiet, 0)
                os.dup2(quiet, 1)
                unshare(CLONE_NEWPID)
                pid = os.fork()
                if pid == 0:
                    for unused in (ready, go, pids, say):
                        os.close(unused)
                    Node(self.spec, node, self.generation).run(tell, listen)
                os.write(say, str(pid).encode())
            finally:
                os._exit(0)
        for unused in (tell, listen, say):
            os.close(unused)
        text = os.read(pids, 64)
        os.close(pids)
        os.waitpid(middle, 0)
        if not text:
            raise RuntimeError(f"no new pid namespace for node {node['name']}")
        return int(text), ready, go

    @staticmethod
    def _expect(ready: int, wanted: bytes, name: str) -> None:
        if not select.select([ready], [], [], 20)[0]:
            raise TimeoutError(f"the init of node {name} is silent")
        got = os.read(ready, 1)
        if got != wanted:
            raise RuntimeError(f"the init of node {name} failed: {(got + os.read(ready, 4096)).decode()}")

    def link(self, name: str, state: str) -> dict[str, Any]:
        """Pull the cable (down) or plug it in again (up)."""
        ip(f"link set {self.links[name]} {state}")
        return {}

    def crash(self, name: str) -> dict[str, Any]:
        """Link down first: a dead machine says no goodbye (no FIN, no RST). Then its init, and with it all."""
        ip(f"link set {self.links[name]} down")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[name], signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pids[name], 0)
        with contextlib.suppress(RuntimeError):  # the namespace may have taken it along already
            ip(f"link del {self.links[name]}")
        del self.pids[name], self.links[name]
        return {}

    def serve(self) -> NoReturn:
        """One command a line, one answer a line, until stdin ends."""
        wake, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        pending = b""
        while True:
            readable = select.select([0, wake], [], [])[0]
            if wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                self._reap()
            if 0 in readable:
                data = os.read(0, 65536)
                if not data:
                    os._exit(0)
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))

    def _answer(self, command: dict[str, Any]) -> None:
        try:
            methods: dict[str, Callable[..., dict[str, Any]]] = {"start": self.start, "start_nodes": self.start_nodes}
            methods |= {"link": self.link, "crash": self.crash}
            answer = methods[command.pop("do")](**command)
        except Exception:
            answer = {"error": traceback.format_exc()}
        os.write(1, json.dumps(answer).encode() + b"\n")

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self.daemons:
                    print(f"{self.daemons.pop(pid)} ended with status {status}", file=sys.stderr, flush=True)


def remove_groups(directories: Sequence[str]) -> None:
    """Remove empty control groups; those whose last process is just leaving get a moment."""
    for directory in directories:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                break
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                    break
                time.sleep(0.01)
            else:
                break


def supervise(spec: dict[str, Any]) -> None:
    """Start the outer init, outlive it, and the test process too should that be killed, and clear up."""
    parent = os.pidfd_open(spec["parent"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told, tell = os.pipe()
    unshare(CLONE_NEWPID)
    outer = os.fork()
    if outer == 0:
        die_with_parent()
        os.read(told, 1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        with open(f"{spec['base']}/log/init.log", "ab", buffering=0) as log:
            os.dup2(log.fileno(), 2)
        os.setsid()
        try:
            unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNS)
            Outer(spec).serve()
        finally:
            os._exit(1)
    child = os.pidfd_open(outer)
    os.write(1, json.dumps({"outer": outer}).encode() + b"\n")
    os.write(tell, b"g")
    os.close(0)  # the outer init alone reads it, and nobody but the test process holds the other end
    os.close(1)
    select.select([child, parent], [], [])
    with contextlib.suppress(ProcessLookupError):
        os.kill(outer, signal.SIGKILL)
    os.waitpid(outer, 0)  # returns after the last process of its pid namespace is gone
    remove_groups(spec["cgroups"])
    shutil.rmtree(spec["base"], ignore_errors=True)


def probe() -> None:
    """Make the namespaces, mounts and links that a cluster needs, once; raises what is refused."""
    unshare(CLONE_NEWPID)
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNS)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc")
    mount("tmpfs", "/tmp", "tmpfs")
    socket.sethostname("probe")
    ip(f"link add {BRIDGE} type bridge", f"link add v0 type veth peer name {LINK}", f"link set v0 master {BRIDGE} up")


if __name__ == "__main__":
    os.environ["PATH"] = PATH
    if sys.argv[1] == "--probe":
        probe()
    else:
        supervise(json.loads(Path(sys.argv[1]).read_text()))
