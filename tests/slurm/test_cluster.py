"""The private SLURM itself: its hosts are apart, its faults do what they say, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import HERE, Cluster, ClusterError, parse_job, start_cluster, why_not
from cpu_share import ControlGroups, process_stat
from slurm_conf import Options

pytestmark = pytest.mark.slurm

#: Prints the share of a core that 0.05 s of work had.
WORK = """
import time
start, work = time.monotonic(), time.process_time()
while time.process_time() < work + 0.05: pass
print(0.05 / (time.monotonic() - start))
"""
#: Receives until the other side closes; prints Mbit/s.
RECEIVE = """
import socket, time
server = socket.create_server(("", 5000)); print("listening", flush=True)
link, _ = server.accept(); start = time.monotonic(); size = 0
while data := link.recv(1 << 16): size += len(data)
print(size * 8e-6 / (time.monotonic() - start))
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).sendall(bytes(1_000_000))"


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *arguments]


def on_every_node(cluster: Cluster, code: str) -> dict[str, str]:
    return {name: cluster.on_node(name, ["sh", "-c", code]).stdout.strip() for name in cluster.nodes}


def host() -> tuple[set[str], str]:
    """The interfaces and mounts of this machine; other clusters have their own."""
    return set(os.listdir("/sys/class/net")), Path("/proc/self/mountinfo").read_text()


def running(cluster: Cluster, *args: str, tasks: str = "srun sleep 300") -> int:
    """A job, after its tasks have started on all its nodes."""
    job = cluster.sbatch(*args, f"--wrap={tasks}")
    cluster.wait_state(job, "RUNNING")
    names = cluster.run(["scontrol", "show", "hostnames", cluster.job(job)["NodeList"]]).stdout.split()
    cluster.wait_for(lambda: all("sleep 300" in str(cluster.processes(name)) for name in names))
    return job


def test_every_host_is_apart(cluster: Cluster) -> None:
    assert cluster.nodes == ["n1", "n2", "n3", "n4"]
    assert set(cluster.nodes_state().values()) == {"IDLE"}
    assert on_every_node(cluster, "hostname") == {name: name for name in cluster.nodes}
    assert cluster.run(["hostname"]).stdout.strip() == "login1"
    addresses = on_every_node(cluster, "ip -o -4 addr show hsn0 | awk '{print $4}'")
    assert addresses == {name: f"{address}/16" for name, address in cluster.addresses.items()}
    assert len({*addresses.values(), "10.77.0.1/16"}) == 5
    assert set(on_every_node(cluster, "cd /sys/class/net && echo *").values()) == {"hsn0 lo"}
    for space in ("pid", "net", "uts", "ipc", "mnt"):
        spaces = [*on_every_node(cluster, f"readlink /proc/1/ns/{space}").values()]
        spaces += [cluster.run(["readlink", f"/proc/1/ns/{space}"]).stdout.strip()]
        spaces += [os.readlink(f"/proc/self/ns/{space}")]
        assert len(set(spaces)) == 6
    nobody = dict.fromkeys(cluster.nodes, "")
    for directory in ("/tmp", "/dev/shm", cluster.local):
        cluster.on_node("n2", ["touch", f"{directory}/mine"])
        assert on_every_node(cluster, f"cd {directory} && ls | grep mine || true") == {**nobody, "n2": "mine"}
        cluster.on_node("n2", ["rm", f"{directory}/mine"])
    cluster.on_node("n3", ["sh", "-c", "echo 3 > from_node"])
    assert set(on_every_node(cluster, "cat from_node").values()) == {"3"}
    assert (cluster.shared / "from_node").read_text() == "3\n"
    resolve = "import socket as s; print([s.getaddrinfo('n4', 1, kind)[0][4][0] for kind in (s.AF_INET, s.AF_INET6)])"
    assert cluster.on_node("n1", python(resolve)).stdout == "['10.77.0.14', '::ffff:10.77.0.14']\n"


def test_srun_over_all_nodes_with_a_gpu_a_task(cluster: Cluster) -> None:
    script = cluster.shared / "a script.sh"
    script.write_text(
        "#!/bin/bash\nsrun --ntasks-per-node=8 --gpus-per-task=1 "
        "bash -c 'echo rank $SLURM_PROCID $(hostname) $ROCR_VISIBLE_DEVICES'\n"
    )
    job = cluster.sbatch("-N4", "-t10", "-Cnvme", "--gpus-per-node=8", "-Ja name=b", script)
    record = cluster.wait(job)
    assert (record["JobState"], record["ExitCode"], record["JobName"]) == ("COMPLETED", "0:0", "a name=b")
    assert (record["NodeList"], record["BatchHost"], record["Command"]) == ("n[1-4]", "n1", str(script))
    lines = [line.split()[1:] for line in Path(record["StdOut"]).read_text().splitlines()]
    found = {int(rank): (host, device) for rank, host, device in lines}
    assert found == {rank: (f"n{rank // 8 + 1}", found[rank][1]) for rank in range(32)}
    for name in cluster.nodes:
        assert {device for host, device in found.values() if host == name} == set("01234567")


def test_usr1_reaches_the_batch_script(cluster: Cluster) -> None:
    script = cluster.shared / "usr1.sh"
    script.write_text("#!/bin/bash\ntrap 'echo caught; exit 5' USR1\ntouch ready\nsleep 300 & wait\n")
    job = cluster.sbatch("-N2", "--signal=B:USR1@60", script)
    cluster.wait_for(cluster.shared / "ready")
    cluster.run(["scancel", "--batch", "--signal=USR1", str(job)])
    record = cluster.wait(job, timeout=60)
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "5:0")
    assert Path(record["StdOut"]).read_text() == "caught\n"


def test_a_killed_task_ends_its_step_everywhere(cluster: Cluster) -> None:
    job = running(cluster, "-N4", tasks="srun --kill-on-bad-exit=1 sleep 300")
    cluster.kill_task("n3", "sleep 300")
    assert cluster.wait(job, timeout=60)["JobState"] == "FAILED"
    assert "n3: task 2: Killed" in Path(cluster.job(job)["StdOut"]).read_text()
    cluster.wait_for(lambda: not any(cluster.processes(name) for name in cluster.nodes))
    with pytest.raises(ClusterError, match="no process on n3"):
        cluster.kill_task("n3", "sleep 300")


@pytest.fixture
def nervous() -> Iterator[Cluster]:
    """A cluster that misses its nodes sooner than others do: 12 s instead of up to 25."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with start_cluster(4, options=Options(slurmd_timeout=5, message_timeout=4, cred_expire=5)) as cluster:
        yield cluster


@pytest.mark.slow
def test_crash_cut_and_dead_slurmd(nervous: Cluster) -> None:
    """One job a node, one fault a node, at once: each is noticed, and the job with --requeue runs elsewhere."""
    cluster = nervous
    jobs = {name: running(cluster, "-N1", f"-w{name}") for name in ("n1", "n2", "n3")}
    requeued = cluster.sbatch("-N1", "--requeue", '--wrap=[ "$SLURM_RESTART_COUNT" ] || srun sleep 300')
    cluster.wait_for(lambda: "sleep 300" in str(cluster.processes("n4")))
    cluster.crash_node("n1")
    cluster.cut_link("n2")
    cluster.kill_slurmd("n3")
    cluster.crash_node("n4")
    assert cluster.processes("n1") == []
    assert "sleep 300" in str(cluster.processes("n2"))  # cut off, but alive
    assert "sleep 300" in str(cluster.processes("n3"))
    for job in jobs.values():
        assert cluster.wait(job, timeout=60)["JobState"] == "NODE_FAIL"
    cluster.wait_for(lambda: all(s.startswith("DOWN") for s in cluster.nodes_state().values()), 60, "four lost nodes")
    assert cluster.wait_state(requeued, "PENDING")["Restarts"] == "1"
    cluster.restore_node("n2")
    record = cluster.wait(requeued, timeout=60)
    assert (record["JobState"], record["Restarts"], record["NodeList"]) == ("COMPLETED", "1", "n2")
    cluster.restore()
    assert set(cluster.nodes_state().values()) == {"IDLE"}
    assert not any(cluster.processes(name) for name in cluster.nodes)
    assert sorted(cluster.run(["srun", "-N4", "hostname"]).stdout.split()) == cluster.nodes


def test_a_node_that_was_away_for_a_moment_only(cluster: Cluster) -> None:
    cluster.crash_node("n3")
    cluster.restore_node("n3")
    cluster.cut_link("n2")
    cluster.mend_link("n2")
    cluster.kill_slurmd("n1")
    assert not cluster.serves("n1")
    cluster.restore()
    assert set(cluster.nodes_state().values()) == {"IDLE"}
    assert sorted(cluster.run(["srun", "-N4", "hostname"]).stdout.split()) == cluster.nodes


def throughput(cluster: Cluster, source: str, target: str) -> float:
    """Mbit/s of a megabyte from one node to another."""
    with open(cluster.shared / "received", "w+") as log:
        command = [*cluster.enter(target), *python(RECEIVE)]
        receiver = subprocess.Popen(command, stdout=log, stdin=subprocess.DEVNULL)
        cluster.wait_for(lambda: "listening" in Path(log.name).read_text())
        cluster.on_node(source, python(SEND, target))
        assert receiver.wait(30) == 0
        return float(Path(log.name).read_text().split()[-1])


def test_slow_link(cluster: Cluster) -> None:
    cluster.slow_link("n2", "20mbit")
    assert 10 < throughput(cluster, "n2", "n1") < 30
    assert 10 < throughput(cluster, "n1", "n2") < 30
    assert throughput(cluster, "n3", "n1") > 100
    cluster.fast_link("n2")
    assert throughput(cluster, "n2", "n1") > 100


@pytest.mark.parametrize("kind", ["as here", "SIGSTOP"])
def test_throttle(cluster: Cluster, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "SIGSTOP":
        monkeypatch.setattr(cluster, "_groups", ControlGroups("SIGSTOP", "", ()))

    def share(name: str) -> float:
        return float(cluster.on_node(name, python(WORK)).stdout)

    # Waits, not measurements: other work on this machine takes its own shares, and delays the signals.
    assert cluster.throttle("n2", 0.05) == cluster.throttles_by
    cluster.wait_for(lambda: share("n2") < 0.12, 30, f"slow node (throttled by {cluster.throttles_by})")
    cluster.wait_for(lambda: share("n1") > 0.2, 30, "fast node")
    cluster.unthrottle("n2")
    cluster.wait_for(lambda: share("n2") > 0.2, 30, "node as fast as before")


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    """With paths below /tmp, as a checkout may be: visible to every host, beside nothing else of /tmp."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    before = host()
    (tmp_path / "given").write_text("seen")
    with start_cluster(names=["frontier00001", "frontier00002"], visible=[tmp_path]) as cluster:
        output = cluster.run(["srun", "-N2", "cat", str(tmp_path / "given")]).stdout
        assert output == "seenseen"
        with tempfile.NamedTemporaryFile(dir="/tmp") as other:
            assert other.name not in cluster.on_node("frontier00002", ["find", "/tmp", "-maxdepth", "1"]).stdout.split()
        alive = cluster.all_processes()
        assert len(alive) >= 8  # supervisor, init, munged, slurmctld and its helper, two inits, two slurmd
        cluster.sbatch("-N2", "--wrap=srun sleep 300")
    assert not cluster.base.exists()
    assert not (alive & set(all_started()))
    assert host() == before
    cluster.close()


def all_started() -> Iterator[tuple[str, str]]:
    """(pid, start time) of every process of this machine that is not a zombie."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = process_stat(process)
            if fields[0] != "Z":
                yield process, fields[19]


@pytest.mark.parametrize("victim", ["test process", "outer init"])
def test_nothing_is_left_after_sigkill(cluster: Cluster, victim: str) -> None:
    before = host()
    code = (
        f"import sys, time; sys.path.insert(0, {str(HERE)!r}); from cluster import start_cluster\n"
        "c = start_cluster(2); print(c.base, c._outer, *(p for p, _ in c.all_processes()), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    base, outer, *pids = process.stdout.readline().split()
    started = {(pid, at) for pid, at in all_started() if pid in pids}
    assert len(started) >= 8
    os.kill(process.pid if victim == "test process" else int(outer), signal.SIGKILL)
    cluster.wait_for(lambda: not Path(base).exists() and not started & set(all_started()), 10, "end of the cluster")
    process.kill()
    process.wait()
    process.stdout.close()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{Path(base).name}"))
    assert host() == before


def test_directory_of_384_nodes(directory: Cluster) -> None:
    def ask(*args: str) -> subprocess.CompletedProcess[str]:
        return directory.run(["sbatch", "--test-only", *args, "--wrap=true"], check=False)

    done = ask("-N384", "-t2:00:00")
    assert done.returncode == 0, done.stderr
    assert "on nodes frontier[00001-00384] in partition batch" in done.stderr
    tasks = ["--ntasks-per-node=8", "--gpus-per-node=8", "--gpus-per-task=1", "-c7", "--gpu-bind=closest"]
    assert ask("-N384", "-t12:00:00", "-Cnvme", "-Aabc123", "-qdebug", *tasks).returncode == 0
    assert ask("-N64", "-pextended", "-t24:00:00").returncode == 0
    assert "at most 720 minutes" in ask("-N384", "-t12:01:00").stderr
    assert "at most 120 minutes" in ask("-N91", "-t2:01:00").stderr
    assert ask("-N92", "-t6:00:00").returncode == 0
    too_much = [["-N385"], ["-N65", "-pextended"], ["-N1", *tasks, "-c57"], ["-N1", "--gpus-per-node=9"]]
    for refused in [*too_much, ["-N2", "-Cmissing"], ["-N1", "-pmissing"]]:
        assert ask("-t10", *refused).returncode != 0, refused


def test_errors_say_what_happened(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="ended with 3\nout\nerr\n"):
        cluster.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    with pytest.raises(ClusterError, match="longer than 0.5 s"):
        cluster.on_node("n1", ["sh", "-c", "sleep 299; true"], timeout=0.5)
    cluster.wait_for(lambda: not cluster.processes("n1"))
    job = running(cluster, "-N1")
    with pytest.raises(ClusterError, match=f"job {job} is RUNNING .* on n1 after 0.2 s"):
        cluster.wait(job, timeout=0.2)
    with pytest.raises(ClusterError, match="no two.txt after"):
        cluster.wait_for("two.txt", 0.1)
    with pytest.raises(ValueError, match="same name"):
        start_cluster(names=["n1", "n1"])
    (cluster.shared / "empty").mkdir()
    with pytest.raises(ValueError, match="/tmp cannot stay visible"):
        start_cluster(1, visible=["/tmp"], directory=cluster.shared / "empty")
    with pytest.raises(ClusterError, match="(?s)slurmctld did not start.*NoSuchOption"):
        start_cluster(1, options=Options(extra="NoSuchOption=1"), directory=cluster.shared / "empty")
    assert not os.listdir(cluster.shared / "empty")


def test_records_of_jobs_with_hostile_names() -> None:
    text = (
        "JobId=7 JobName=a JobState=X\nb\n   UserId=root(0) GroupId=root(0) MCS_label=N/A\n"
        "   JobState=NODE_FAIL Reason=NodeDown(x y) Dependency=(null)\n   ExitCode=0:53\n"
        "   NodeList=n[1-2]\n   Command=/a b/run.sh --x=1 JobState=Y\n   WorkDir=/a b\n   StdOut=/a b/O=1.out\n"
    )
    fields = parse_job(text)
    assert fields["JobName"] == "a JobState=X\nb"
    assert (fields["JobState"], fields["Reason"], fields["ExitCode"]) == ("NODE_FAIL", "NodeDown(x y)", "0:53")
    assert (fields["Command"], fields["StdOut"]) == ("/a b/run.sh --x=1 JobState=Y", "/a b/O=1.out")
