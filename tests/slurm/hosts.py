"""Hosts on one machine: a login host and nodes, each with its own name, address, processes and /tmp, and their faults.

SLURM's daemons run on them (``namespaces.py`` starts them), but what SLURM thinks of it all is left to ``cluster.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import namespaces
from cpu_share import ControlGroups, DutyCycle, control_groups, process_stat

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LOGIN_ADDRESS = "10.77.0.1"
PREFIX = 16
_ENTER = '[ -z "$1" ] || echo 0 > "$1"; cd -- "$2" && shift 2 && exec "$@"'
Self = TypeVar("Self", bound="Hosts")


class ClusterError(RuntimeError):
    """The cluster did not do what was asked; carries the ends of its logs."""


class Hosts:
    """The base class of ``Cluster``. A context manager; ``close`` ends it.

    shared: a directory with the same path on every host and here.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        *,
        login: str,
        visible: Sequence[str | Path],
        local: str,
        directory: str | Path | None,
    ) -> None:
        self.addresses = dict(addresses)
        self.nodes = list(addresses)
        self.login = login
        self.local = local
        self._visible = _visible([*visible, ROOT, sys.prefix, sys.base_prefix, sys.executable])
        parent = Path(directory or "/var/tmp").resolve()
        self.base = Path(tempfile.mkdtemp(prefix="slurm-", dir=parent))
        self.base.chmod(0o755)
        self.shared = self.base / "shared"
        for name in ("etc/slurm", "run", "log", "munge", "state", "spool", "mnt", "dev", "shared"):
            (self.base / name).mkdir(parents=True)
        self._visible.append(str(self.base))
        self._groups = ControlGroups("SIGSTOP", "", ())
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._outer = 0
        self._pids: dict[str, int] = {}  # node → pid of its init, as seen here
        self._links: dict[str, str] = {}  # node → its link's name on the login host's side
        self._cut: set[str] = set()
        self._slow: set[str] = set()
        self._cycles: dict[str, DutyCycle] = {}
        self._closed = False
        self._lock = threading.Lock()

    def start_hosts(self) -> None:
        """Start the login host and all nodes, with their daemons; what they need lies in ``base`` already."""
        self._groups = control_groups(self.base.name, self.nodes)
        spec = {
            "base": str(self.base),
            "parent": os.getpid(),
            "login": {"name": self.login, "address": LOGIN_ADDRESS},
            "prefix": PREFIX,
            "nodes": [
                {"name": name, "address": address, "cgroup_files": self._groups.files(name)}
                for name, address in self.addresses.items()
            ],
            "visible": self._visible,
            "local": self.local,
            "cgroups": self._groups.directories,
        }
        path = self.base / "run/spec.json"
        path.write_text(json.dumps(spec))
        command = [sys.executable, "-I", "-S", str(HERE / "namespaces.py"), str(path)]
        self._supervisor = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd="/"
        )
        self._outer = self._answer(10)["outer"]
        self._command(do="start")
        if self.nodes:
            self.start_nodes(self.nodes)

    def start_nodes(self, names: Sequence[str]) -> None:
        """Start nodes that are not running."""
        answer = self._command(do="start_nodes", names=list(names))
        inside = {pid: name for name, pid in answer["pids"].items()}
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                numbers = _namespace_pids(process)
                # A child of the outer init (its pid is the last but one) that is itself an init.
                if numbers[2:] and numbers[-1] == 1 and int(process_stat(process)[1]) == self._outer:
                    name = inside.get(numbers[-2], "")
                    self._pids.update({name: int(process)} if name else {})
        self._links.update(answer["links"])

    def close(self) -> None:
        """End everything, and raise ClusterError if anything is left. May be called again."""
        if self._closed:
            return
        self._closed = True
        for cycle in self._cycles.values():
            cycle.stop()
        alive = self.all_processes()
        if self._supervisor is not None:
            for pipe in (self._supervisor.stdin, self._supervisor.stdout):
                if pipe:
                    pipe.close()
            try:
                self._supervisor.wait(20)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()  # and with it the outer init
                self._supervisor.wait()
        # The supervisor did this already, unless it could not even start.
        namespaces.remove_groups(self._groups.directories)
        shutil.rmtree(self.base, ignore_errors=True)
        left = self._leftovers(alive)
        if left:
            raise ClusterError("the closed cluster left behind: " + "; ".join(left))

    def all_processes(self) -> set[tuple[str, str]]:
        """(pid, start time) of all processes in any pid namespace of this cluster, and of its supervisor."""
        inits = [pid for pid in (self._outer, *self._pids.values()) if pid]
        spaces = {os.readlink(f"/proc/{pid}/ns/pid") for pid in inits if os.path.exists(f"/proc/{pid}/ns/pid")}
        found = set()
        if self._supervisor and self._supervisor.poll() is None:
            found.add((str(self._supervisor.pid), process_stat(self._supervisor.pid)[19]))
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process}/ns/pid") in spaces:
                    found.add((process, process_stat(process)[19]))
        return found

    def _leftovers(self, alive: set[tuple[str, str]]) -> list[str]:
        """What the closed cluster left on this machine: processes, mounts, directories, control groups."""
        left = [str(path) for path in [self.base, *map(Path, self._groups.directories)] if path.exists()]
        for process, started in sorted(alive):
            with contextlib.suppress(OSError):
                if process_stat(process)[19] == started:
                    left.append(f"process {process}: {command_line(process)}")
        if str(self.base) in Path("/proc/self/mountinfo").read_text():
            left.append(f"mounts below {self.base}")
        return left

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def logs(self, lines: int = 15) -> str:
        """The last lines of every daemon's log."""
        parts = []
        for path in sorted((self.base / "log").glob("*")):
            if path.suffix == ".err" and path.with_suffix(".log").exists():
                continue  # the same again
            text = path.read_text(errors="replace").splitlines()[-lines:]
            parts += [f"--- {path.name}", *text] if text else []
        return "\n".join(parts)

    def _command(self, **command: Any) -> dict[str, Any]:
        assert self._supervisor is not None and self._supervisor.stdin is not None
        with self._lock:
            self._supervisor.stdin.write(json.dumps(command).encode() + b"\n")
            self._supervisor.stdin.flush()
            answer = self._answer(60)
        if "error" in answer:
            raise ClusterError(f"{command}: {answer['error']}\n{self.logs()}")
        return answer

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self._supervisor is not None and self._supervisor.stdout is not None
        output, data, deadline = self._supervisor.stdout.fileno(), b"", time.monotonic() + timeout
        while not data.endswith(b"\n"):
            if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ClusterError(f"the cluster's init is silent\n{self.logs()}")
            more = os.read(output, 65536)
            if not more:
                raise ClusterError(f"the cluster's init is gone\n{self.logs()}")
            data += more
        return dict(json.loads(data))

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 60.0,
        check: bool = True,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """A command on the login host; ``env`` is added to this process's environment (None removes a name).

        SLURM's own variables and TMPDIR of this process are not passed on. ``cwd`` is ``shared`` unless given.
        Raises ClusterError with the output if ``check`` and the exit code is not 0, or after ``timeout`` seconds.
        """
        return self._run("", argv, env=env, cwd=cwd, timeout=timeout, check=check, stdin=stdin)

    def on_node(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 60.0,
        check: bool = True,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As ``run``, on a node, outside any job; throttled with it, and it dies with it."""
        return self._run(name, argv, env=env, cwd=cwd, timeout=timeout, check=check, stdin=stdin)

    def _pid(self, name: str) -> int:
        if name not in self._pids:
            raise ClusterError(f"node {name} is not running (known: {', '.join(self.nodes)})")
        return self._pids[name]

    def shell(self, argv: Sequence[str]) -> int:
        """A command on the login host with this process's terminal. Returns its exit code."""
        return subprocess.call([*self.enter(""), *argv], env=_environment(None))

    def enter(self, name: str, cwd: str | Path | None = None) -> list[str]:
        """The beginning of a command line that runs the rest on a node ("": the login host), for subprocess.Popen."""
        pid, groups = (self._pid(name), self._groups.files(name)) if name else (self._outer, [])
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid"]
        directory = str(cwd or self.shared)
        return ["nsenter", f"--target={pid}", *spaces, "--", "/bin/sh", "-c", _ENTER, "sh", "".join(groups), directory]

    def _run(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str | None] | None,
        cwd: str | Path | None,
        timeout: float,
        check: bool,
        stdin: str | None,
    ) -> subprocess.CompletedProcess[str]:
        process = subprocess.Popen(
            [*self.enter(name, cwd), *map(str, argv)],
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(env),
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(stdin, timeout=timeout)
        except BaseException as error:
            # The session spans the namespaces, so its process group reaches what nsenter started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ClusterError(f"{list(argv)} ran longer than {timeout:g} s\n{output}{errors}") from None
            raise
        if check and process.returncode:
            raise ClusterError(f"{list(argv)} ended with {process.returncode}\n{output}{errors}")
        return subprocess.CompletedProcess(list(argv), process.returncode, output, errors)

    def wait_for(self, what: str | Path | Callable[[], Any], timeout: float = 30.0, name: str = "") -> Any:
        """Wait until a path exists or a function returns something true, which is returned."""
        ready = what if callable(what) else Path(what).exists
        deadline = time.monotonic() + timeout
        while True:
            result = ready()
            if result:
                return result
            if time.monotonic() > deadline:
                raise ClusterError(f"no {name or what} after {timeout:g} s\n{self.logs(8)}")
            time.sleep(0.05)

    def processes(self, name: str) -> list[tuple[int, str]]:
        """(pid on this machine, command line) of what runs on the node: tasks, scripts, not the daemons, no zombies.

        The first started comes first: numbers of processes begin again at the end of their range.
        """
        return [(pid, line) for pid, line in self.members(name) if program(line) not in ("slurmd", "slurmstepd:")]

    def members(self, name: str) -> list[tuple[int, str]]:
        init = self._pids.get(name)
        if init is None:
            return []
        space = os.readlink(f"/proc/{init}/ns/pid")
        found = []
        for process in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
            with contextlib.suppress(OSError):
                if process != init and os.readlink(f"/proc/{process}/ns/pid") == space:
                    line = command_line(process)
                    found += [(int(process_stat(process)[19]), process, line)] if line else []
        return [(process, line) for _, process, line in sorted(found)]

    def crash_node(self, name: str) -> None:
        """The node is dead at once and says no goodbye: link down, then SIGKILL to all, namespaces gone."""
        self._pid(name)
        self.unthrottle(name)
        self._cut.discard(name)
        self._slow.discard(name)
        self._command(do="crash", name=name)
        del self._pids[name], self._links[name]

    def cut_link(self, name: str) -> None:
        """Pull the cable: nothing reaches the node and nothing leaves it, and nobody is told."""
        self._pid(name)
        self._command(do="link", name=name, state="down")
        self._cut.add(name)

    def mend_link(self, name: str) -> None:
        if name in self._cut and name in self._links:
            self._command(do="link", name=name, state="up")
        self._cut.discard(name)

    @property
    def running(self) -> list[str]:
        """The nodes that have not crashed."""
        return [name for name in self.nodes if name in self._pids]

    def serves(self, name: str) -> bool:
        """Whether a slurmd listens on the node."""
        # Local address, foreign address and state of each socket in the node's network namespace, in hexadecimal.
        table = Path(f"/proc/{self._pid(name)}/net/tcp").read_text()
        return bool(re.search(rf":{namespaces.NODE_PORT:04X} \w+:0000 0A ", table))

    def start_slurmd(self, name: str) -> None:
        """Start slurmd on a node where none is left, and wait until it listens."""
        if not self.serves(name):
            os.kill(self._pid(name), signal.SIGHUP)
            self.wait_for(lambda: self.serves(name), 20, f"slurmd on {name}")

    def slow_link(self, name: str, rate: str = "20mbit") -> None:
        """Limit the node's link in both directions (tc tbf)."""
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
        self.run(["tc", "qdisc", "replace", "dev", self._links[name], *shape])
        self.on_node(name, ["tc", "qdisc", "replace", "dev", namespaces.LINK, *shape])
        self._slow.add(name)

    def fast_link(self, name: str) -> None:
        if name in self._slow and name in self._links:
            self.run(["tc", "qdisc", "del", "dev", self._links[name], "root"])
            self.on_node(name, ["tc", "qdisc", "del", "dev", namespaces.LINK, "root"])
        self._slow.discard(name)

    @property
    def throttles_by(self) -> str:
        """How ``throttle`` works here: "cgroup v1", "cgroup v2" or "SIGSTOP"."""
        return self._groups.kind

    def throttle(self, name: str, share: float = 0.2) -> str:
        """All processes of the node together get this share of one core. Returns ``throttles_by``.

        SIGSTOP: each process runs this share of the time instead.
        """
        self._pid(name)
        if not self._groups.limit(name, share):
            self.unthrottle(name)
            self._cycles[name] = DutyCycle(lambda: [pid for pid, _ in self.members(name)], share)
        return self._groups.kind

    def unthrottle(self, name: str) -> None:
        self._groups.limit(name, 0)
        cycle = self._cycles.pop(name, None)
        if cycle:
            cycle.stop()


def _visible(paths: Sequence[str | Path]) -> list[str]:
    """The paths, and what they lead to through links."""
    texts = [os.path.abspath(path) for path in paths]
    found = dict.fromkeys([*texts, *map(os.path.realpath, texts)])
    for path in ("/", "/tmp", "/dev/shm"):
        if path in found:
            raise ValueError(f"{path} cannot stay visible: each host has its own")
    return [path for path in found if os.path.exists(path)]


def _environment(more: Mapping[str, str | None] | None) -> dict[str, str]:
    """This process's environment without what speaks of another SLURM or of a private directory, and ``more``."""
    drop = re.compile(r"(SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SCANCEL|SCONTROL|PMI)\w*|TMPDIR|TMP|TEMP|XDG_RUNTIME_DIR")
    values: dict[str, str | None] = {name: value for name, value in os.environ.items() if not drop.fullmatch(name)}
    user = pwd.getpwuid(os.geteuid())
    values.update(USER=user.pw_name, LOGNAME=user.pw_name, HOME=os.environ.get("HOME", user.pw_dir))
    values["PATH"] = f"{os.environ.get('PATH', '')}:{namespaces.PATH}".lstrip(":")
    values.update(more or {})
    return {name: value for name, value in values.items() if value is not None}


def _namespace_pids(process: str) -> list[int]:
    """The pids of a process from this namespace inwards."""
    found = re.search(r"^NSpid:(.*)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return [int(number) for number in found[1].split()] if found else []


def command_line(process: int | str) -> str:
    """The command line; nothing for a zombie."""
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def program(line: str) -> str:
    return os.path.basename(line.split(" ", 1)[0])
