"""Give all processes of a node a share of one core: by control groups, or by stopping and continuing them in turn."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import namespaces


def process_stat(process: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the state on: 1 is the parent, 19 the time of the start."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


class DutyCycle:
    """Stop and continue processes in turn, where no control group can be made."""

    PERIOD = 0.1

    def __init__(self, members: Callable[[], list[int]], share: float) -> None:
        self._members, self._share = members, share
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._turn, daemon=True)
        self._thread.start()

    def _turn(self) -> None:
        stopped: set[int] = set()
        while not self._done.wait(self.PERIOD * self._share):
            stopped = self._signal(self._members(), signal.SIGSTOP)
            self._done.wait(self.PERIOD * (1 - self._share))
            self._resume(stopped)
        self._resume(stopped)

    def _resume(self, stopped: set[int]) -> None:
        """nsenter stops itself when its child is stopped, hence the parents."""
        self._signal(stopped, signal.SIGCONT)
        parents = set()
        for pid in stopped:
            with contextlib.suppress(OSError):
                parents.add(int(process_stat(pid)[1]))
        self._signal(parents - {0, 1}, signal.SIGCONT)

    @staticmethod
    def _signal(pids: Sequence[int] | set[int], number: int) -> set[int]:
        reached = set()
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
                reached.add(pid)
        return reached

    def stop(self) -> None:
        self._done.set()
        self._thread.join()


class ControlGroups:
    """One cpu control group a node, in cgroup v1 or v2, or none where they cannot be made."""

    PERIOD_US = 20_000

    def __init__(self, kind: str, root: str, names: Sequence[str]) -> None:
        self.kind, self.root = kind, root
        self._names = set(names) if root else set()
        #: To be removed in this order.
        self.directories = [*(f"{root}/{name}" for name in names), root] if root else []

    def files(self, name: str) -> list[str]:
        """The files per process of the node writes 0 into to join."""
        return [f"{self.root}/{name}/cgroup.procs"] if name in self._names else []

    def limit(self, name: str, share: float) -> bool:
        """Share of one core; 0: no limit. False where there is no group."""
        if name not in self._names:
            return False
        quota = max(1000, int(share * self.PERIOD_US))
        directory = Path(self.root, name)
        if self.kind == "cgroup v2":
            (directory / "cpu.max").write_text(f"{quota if share else 'max'} {self.PERIOD_US}")
        else:
            (directory / "cpu.cfs_period_us").write_text(str(self.PERIOD_US))
            (directory / "cpu.cfs_quota_us").write_text(str(quota if share else -1))
        return True


def control_groups(token: str, names: Sequence[str]) -> ControlGroups:
    """Make the groups of a cluster. Only below the hierarchy's root, whose own settings stay as they are."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines() if names else []:
        fields, _, tail = line.partition(" - ")
        kind, _, flags = tail.split(" ", 2)
        where = fields.split()[4]
        version = "v1" if kind == "cgroup" and "cpu" in flags.split(",") else "v2" if kind == "cgroup2" else ""
        root = Path(where, token)
        with contextlib.suppress(OSError):
            if version == "v2" and "cpu" not in Path(where, "cgroup.subtree_control").read_text().split():
                continue
            if version:
                groups = ControlGroups(f"cgroup {version}", str(root), names)
                try:
                    root.mkdir()
                    if version == "v2":
                        (root / "cgroup.subtree_control").write_text("+cpu")
                    for name in names:
                        (root / name).mkdir()
                        groups.limit(name, 0)
                    return groups
                except OSError:
                    namespaces.remove_groups([path for path in groups.directories if os.path.isdir(path)])
    return ControlGroups("SIGSTOP", "", ())
