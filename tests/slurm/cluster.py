"""A private multi-node SLURM on one machine, for tests: real daemons, each node with namespaces of its own.

    with start_cluster(nodes=4) as cluster:
        job = cluster.sbatch("-N4", "--wrap=srun hostname")
        print(cluster.wait(job)["JobState"], (cluster.shared / f"slurm-{job}.out").read_text())

Needs root and Debian's slurm-wlm, munge and iproute2; ``why_not()`` says what is missing. Standard library only.
A shell on the login host of a fresh cluster: ``python tests/slurm/cluster.py --nodes 4 -- bash``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import namespaces  # noqa: E402
import slurm_conf  # noqa: E402
from hosts import LOGIN_ADDRESS, ClusterError, Hosts, program  # noqa: E402
from slurm_conf import Options, Shape  # noqa: E402

PACKAGES = {
    "sbatch": "slurm-wlm",
    "srun": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
#: States that a job does not leave by itself. A requeued job is PENDING meanwhile.
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")



@functools.cache
def why_not() -> str:
    """Why no cluster can be started here, or nothing."""
    if sys.platform != "linux":
        return "a private SLURM needs Linux"
    lacking = [name for name in PACKAGES if not shutil.which(name, path=namespaces.PATH)]
    if lacking:
        packages = " ".join(dict.fromkeys(PACKAGES[name] for name in lacking))
        return f"no {', '.join(lacking)} here (apt-get install --no-install-recommends {packages})"
    if os.geteuid() != 0:
        return "starting a private SLURM needs root"
    if not os.path.isdir("/etc/slurm"):
        return "no /etc/slurm here, where this SLURM would look for its configuration"
    command = [sys.executable, "-I", "-S", str(HERE / "namespaces.py"), "--probe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        return f"namespaces or links are refused here: {done.stderr.strip().splitlines()[-1:]}"
    return ""


def start_cluster(
    nodes: int = 4,
    *,
    names: Sequence[str] = (),
    login: str = "login1",
    visible: Sequence[str | Path] = (),
    local: str = "/mnt/bb/root",
    directory: str | Path | None = None,
    options: Options | None = None,
    timeout: float = 30.0,
) -> Cluster:
    """A running cluster whose nodes are all idle.

    names: host names instead of n1, n2, ...
    visible: paths that must stay visible where they lie below /tmp or /dev/shm, which every host has for itself; the
        checkout, the interpreter and ``cluster.shared`` always are.
    local: an empty private directory on every host, as the NVMe of a node; the path need not exist here. "": none.
    directory: where the cluster's own temporary directory goes (/var/tmp).
    """
    hosts = list(names) or [f"n{index + 1}" for index in range(nodes)]
    if len(set(hosts)) != len(hosts):
        raise ValueError(f"two nodes have the same name: {hosts}")
    addresses = {name: f"10.77.{(index + 10) // 250}.{(index + 10) % 250 + 1}" for index, name in enumerate(hosts)}
    options = options or Options()
    cluster = Cluster(addresses, login=login, visible=visible, local=local, directory=directory)
    conf = slurm_conf.slurm_conf(str(cluster.base), (login, LOGIN_ADDRESS), addresses, options)
    gres = slurm_conf.gres_conf(",".join(hosts), f"{cluster.base}/dev", options.shape.gpus)
    cluster.start(conf=conf, gres=gres, gpus=options.shape.gpus, timeout=timeout)
    return cluster


def start_directory(
    nodes: int = 384,
    *,
    prefix: str = "frontier",
    options: Options | None = None,
    visible: Sequence[str | Path] = (),
    timeout: float = 60.0,
) -> Cluster:
    """A slurmctld that knows ``nodes`` Frontier nodes which do not exist: for ``sbatch --test-only`` and nothing else.

    Queue limits are OLCF's: ``batch`` 2, 6 or 12 hours by node count, ``extended`` 64 nodes and 24 hours.
    """
    names = f"{prefix}[{1:05d}-{nodes:05d}]"
    options = options or Options()
    cluster = Cluster({}, login="login1", visible=visible, local="", directory=None)
    conf = slurm_conf.directory_conf(str(cluster.base), ("login1", LOGIN_ADDRESS), names, options)
    gres = slurm_conf.gres_conf(names, f"{cluster.base}/dev", options.shape.gpus)
    cluster.start(conf=conf, gres=gres, gpus=options.shape.gpus, timeout=timeout, job_submit=slurm_conf.JOB_SUBMIT)
    return cluster


class Cluster(Hosts):
    """SLURM on ``Hosts``, which has the other methods. Use ``start_cluster`` or ``start_directory``.

    A context manager; ``close`` ends it. ``shared`` is a directory with the same path on every host and here.
    """

    def start(self, *, conf: str, gres: str, gpus: int, timeout: float, job_submit: str = "") -> None:
        """Write the configuration, start the daemons, wait for the nodes. Called by the constructors above."""
        etc = self.base / "etc"
        (etc / "slurm/slurm.conf").write_text(conf)
        (etc / "slurm/gres.conf").write_text(gres)
        (etc / "slurm/job_submit.lua").write_text(job_submit)
        (etc / "hosts").write_text(slurm_conf.hosts({self.login: LOGIN_ADDRESS, **self.addresses}))
        (etc / "nsswitch.conf").write_text(slurm_conf.NSSWITCH)
        for index in range(gpus):
            # slurmd wants a device; this one is as good as /dev/null
            os.mknod(self.base / f"dev/renderD{128 + index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        key = self.base / "munge/key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        try:
            self.start_hosts()
            self.wait_for(lambda: self._states("IDLE"), timeout, "idle nodes")
        except BaseException:
            self.close()
            raise

    def sbatch(
        self, *args: str | Path, env: Mapping[str, str | None] | None = None, cwd: str | Path | None = None
    ) -> int:
        """Submit from the login host. Returns the job id."""
        done = self.run(["sbatch", "--parsable", *map(str, args)], env=env, cwd=cwd)
        return int(done.stdout.strip().splitlines()[-1].split(";")[0])

    def job(self, job: int) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        return parse_job(self.run(["scontrol", "show", "job", str(job)]).stdout)

    def wait(self, job: int, timeout: float = 300.0) -> dict[str, str]:
        """The job's fields once it has ended; after a requeue that is the end of the last run."""
        return self.wait_state(job, ENDED, timeout)

    def wait_state(self, job: int, states: str | Sequence[str], timeout: float = 60.0) -> dict[str, str]:
        """The job's fields once ``JobState`` is one of ``states``. Raises ClusterError after ``timeout`` seconds."""
        wanted = {states} if isinstance(states, str) else set(states)
        deadline = time.monotonic() + timeout
        while True:
            fields, about = {}, ""
            try:
                fields = self.job(job)
                about = f"{fields['JobState']} ({fields.get('Reason')}) on {fields.get('NodeList')}"
            except ClusterError as error:  # slurmctld may be too busy to answer at once
                about = f"unknown ({error})"
            if fields.get("JobState") in wanted:
                return fields
            if time.monotonic() > deadline:
                tail = ""
                with contextlib.suppress(OSError, KeyError):
                    tail = "\n".join(Path(fields["StdOut"]).read_text(errors="replace").splitlines()[-20:])
                wait = f"job {job} is {about} after {timeout:g} s, not {'/'.join(sorted(wanted))}"
                raise ClusterError(f"{wait}\n{tail}\n{self.logs(8)}")
            time.sleep(0.15)

    def nodes_state(self) -> dict[str, str]:
        """Node → its state in capitals, flags after a plus sign: IDLE, ALLOCATED, DOWN, IDLE+COMPLETING, ..."""
        text = self.run(["scontrol", "--oneliner", "show", "node"]).stdout
        return dict(re.findall(r"^NodeName=(\S+) .*? State=(\S+)", text, re.MULTILINE))

    def _states(self, state: str) -> bool:
        return all(self.nodes_state().get(name) == state for name in self.nodes)

    def cancel_all(self) -> None:
        """Kill all jobs and wait until none is left."""
        self.run(["scancel", "--signal=KILL", "--full", "--user=root"], check=False)
        self.run(["scancel", "--user=root"], check=False)
        self.wait_for(lambda: not self.run(["squeue", "--noheader"]).stdout.strip(), 40, "empty queue")

    def restore_node(self, name: str, timeout: float = 30.0) -> None:
        """Undo every fault of a node and wait until SLURM has it idle (or at work) again."""
        self._repair(name)

        def serving() -> bool:
            state = self.nodes_state()[name]
            if re.search(r"DOWN|DRAIN|FAIL|NOT_RESPONDING|\*", state):
                self.run(["scontrol", "update", f"NodeName={name}", "State=RESUME"], check=False)
                return False
            return state in ("IDLE", "ALLOCATED", "MIXED")

        self.wait_for(serving, timeout, f"service of node {name}")

    def _repair(self, name: str) -> None:
        """Everything runs again and nothing is slow; SLURM may not have noticed yet."""
        if name not in self.running:
            self.start_nodes([name])
        self.mend_link(name)
        self.fast_link(name)
        self.unthrottle(name)
        self.start_slurmd(name)

    def restore(self, timeout: float = 60.0) -> None:
        """No jobs, no faults, all nodes idle."""
        for name in self.nodes:
            self._repair(name)  # first, so that nobody waits for jobs on a node that is away
        self.cancel_all()
        for name in self.nodes:
            for pid, _ in self.processes(name):  # a dead slurmd leaves its tasks behind
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        states = self.nodes_state()
        for name in self.nodes:
            if states[name] != "IDLE":
                self.restore_node(name, timeout)
        self.wait_for(lambda: self._states("IDLE"), timeout, "idle nodes")

    def kill_slurmd(self, name: str) -> None:
        """SIGKILL to the node's slurmd; its step daemons and tasks live on. ``restore_node`` starts it again."""
        for pid, line in self.members(name):
            if program(line) == "slurmd":
                os.kill(pid, signal.SIGKILL)
        self.wait_for(lambda: not self.serves(name), 10, f"end of slurmd on {name}")

    def kill_task(self, name: str, pattern: str, number: int = signal.SIGKILL) -> int:
        """Signal the first process of the node whose command line matches. Returns its pid (on this machine)."""
        for pid, line in self.processes(name):
            if re.search(pattern, line):
                os.kill(pid, number)
                return pid
        raise ClusterError(f"no process on {name} matches {pattern!r}: {self.processes(name)}")

def parse_job(text: str) -> dict[str, str]:
    """``scontrol show job`` as a dictionary; names and paths may hold spaces, equal signs and newlines."""
    first = re.match(r"JobId=(\d+) (?:ArrayJobId=.*?)?JobName=(.*?)\n   UserId=", text, re.DOTALL)
    fields = {"JobId": first[1], "JobName": first[2]} if first else {}
    # These have a line to themselves, and their value is what a user chose.
    alone = "Command|WorkDir|StdErr|StdIn|StdOut|Comment|AdminComment|Dependency|Power|TresPerNode|TresPerTask"
    for line in (text[first.end(2) + 1 :] if first else text).splitlines():
        whole = re.match(rf"\s*({alone})=(.*)", line)
        if whole:
            fields[whole[1]] = whole[2]
            continue
        parts = re.split(r"(?:^|\s+)([A-Z][\w:/]*)=", line)
        for key, value in zip(parts[1::2], parts[2::2]):
            fields.setdefault(key, value)
    return fields


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs that each node claims to have")
    parser.add_argument("--directory", action="store_true", help="nodes on paper, for sbatch --test-only")
    parser.add_argument("command", nargs="*", default=["bash"])
    options = parser.parse_args()
    reason = why_not()
    if reason:
        print(f"no cluster: {reason}", file=sys.stderr)
        return 2
    started = time.monotonic()
    if options.directory:
        cluster = start_directory(options.nodes)
    else:
        cluster = start_cluster(options.nodes, options=Options(shape=Shape(gpus=options.gpus)))
    with cluster:
        print(f"{options.nodes} nodes in {time.monotonic() - started:.2f} s; shared: {cluster.shared}", file=sys.stderr)
        return cluster.shell(options.command)


if __name__ == "__main__":
    raise SystemExit(main())
