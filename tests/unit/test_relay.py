"""Runs of several nodes, as processes of this machine, with ranks that do nothing but what a test says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_port.run.processes import born

PROGRAM = """
import os, signal, socket, sys, time, types
from pathlib import Path
place, nodes, spares, port, secret = int(sys.argv[2]), *sys.argv[3:]
nodes, spares = int(nodes), int(spares)
socket.gethostname = lambda: f"n{place}"
# The module itself would import torch, which no test here needs.
listen = lambda info: socket.create_server((info.master_addr, info.master_port))
sys.modules["megatron_port.run.rendezvous"] = types.SimpleNamespace(listen=listen)
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import PortError
from megatron_port.run import relay
from megatron_port.run.agent import Agent, Kept
from megatron_port.run.local_ranks import Meeting, process_info
relay.SPARES_S, relay.SILENCE_S, relay.FENCE_S = 8.0, {silence}, {silence} / 2
log = open(sys.argv[1], "a", buffering=1)
class Watched(Agent):
    def on_told(self, *told):
        super().on_told(*told)
        if self._all_train(): say("trains", self._number)
relay.Agent = Watched
def say(*words): log.write(" ".join(map(str, words)) + "\\n")
def follow(kept, local, step):
    following = kept.link.lost("a peer", victim=True, step=step)
    if following is None: sys.exit(3)
    meeting, kept.recovery = following
    return process_info(meeting, local)
def until_left(kept, seconds=25):
    end = time.monotonic() + seconds
    while not LEFT and time.monotonic() < end: time.sleep(0.01)
    return bool(LEFT)
LEFT, LOOKED = [], []
relay.LOOK_S = 0.2
def left():
    LOOKED.append(place)
    say("looked", place, len(LOOKED))
    return len(LOOKED) > {looks}
def rank(info, kept):
    while True:
        number = kept.recovery.number if kept.recovery else 0
        say("start", number, "rank", info.rank, "of", info.world_size, "on", info.hostname, "pid", os.getpid())
        if info.rank == 0: say("meet", number, *(host for host, _ in info.nodes))
        LEFT.clear()
        kept.link.leave = LEFT.append
        kept.link.running(10 * number + 1, 1)
        code = step(info, kept, number)
        if code is not None: return code
        info = follow(kept, info.local_rank, 10 * number + 2)
{body}
info = ProcessInfo(place, nodes, 0, 1, place, nodes, "127.0.0.1", int(port), "test", f"n{place}", secret=secret)
kept = Kept(Meeting(0, "", 0, ("",) * (nodes - spares), 2, secret=secret), rank, lambda: say("let go", place),
            lambda world: world <= {fits}, lambda why: say("failed", why), lambda: left())
try:
    sys.exit(relay.keep_nodes(info, kept, timeout_s={wait}))
except PortError as error:
    print("error:", error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Nodes:
    """Processes of a run's nodes."""

    def __init__(
        self, folder: Path, body: str, *, nodes: int, spares: int = 0, fits: int = 0, silence: int = 60, wait: int = 30,
        come: int = 99, looks: int = 99,
    ) -> None:
        """``come``: of the nodes, those that are started. ``looks``: of a node without an agent that find its copies in
        use."""
        self.log, self.port = folder / "log", free_port()
        program = PROGRAM.replace("{body}", body)
        for name, value in (("fits", fits), ("silence", silence), ("wait", wait), ("looks", looks)):
            program = program.replace(f"{{{name}}}", str(value))
        self.processes = [self.start(program, place, nodes, spares) for place in range(min(nodes, come))]

    def start(self, program: str, place: int, nodes: int, spares: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", program, str(self.log), str(place), str(nodes), str(spares), str(self.port), "s3"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )

    def said(self, sign: str) -> list[str]:
        text = self.log.read_text() if self.log.exists() else ""
        return [line for line in text.splitlines() if line.startswith(sign)]

    def until(self, sign: str, count: int = 1, seconds: float = 30) -> None:
        """Wait for so many lines that begin so."""
        end = time.monotonic() + seconds
        while len(self.said(sign)) < count:
            assert time.monotonic() < end, self.log.read_text() if self.log.exists() else "nothing"
            time.sleep(0.02)

    def trains(self, number: int = 0) -> dict[int, tuple[str, str]]:
        """Ranks of a start, once the agent has heard of all that they train."""
        self.until(f"trains {number}")
        return ranks(self.said(f"start {number}"))

    def end(self, seconds: float = 60) -> tuple[list[int], str]:
        """Exit codes, and all that was printed."""
        printed = [process.communicate(timeout=seconds)[0] for process in self.processes]
        return [process.returncode for process in self.processes], "\n".join(printed)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def ranks(lines: list[str]) -> dict[int, tuple[str, str]]:
    """Rank → (node, process) of ``start`` lines."""
    return {int(words[3]): (words[7], words[9]) for words in (line.split() for line in lines)}


STAYS = """
def step(info, kept, number):
    if number == {last}:
        time.sleep(0.5)
        return 0
    assert until_left(kept)
"""


def test_a_lost_node_gives_its_place_to_a_spare_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, STAYS.format(last=1), nodes=4, spares=1)
    first = nodes.trains()
    nodes.processes[1].kill()
    codes, printed = nodes.end()
    assert codes == [0, -9, 0, 0], printed
    second = ranks(nodes.said("start 1"))
    assert {r: node for r, (node, _) in second.items()} == {0: "n0", 1: "n0", 2: "n3", 3: "n3", 4: "n2", 5: "n2"}
    assert all(first[rank] == second[rank] for rank in (0, 1, 4, 5)), "they keep their processes"
    assert nodes.said("meet 1") == ["meet 1 n0 n3 n2"]
    assert "recovery 1: node n1 is lost: its connection has ended; ranks that keep their processes: 4" in printed
    assert "nodes: n0, n3, n2; spare nodes left: 0" in printed
    assert sorted(nodes.said("let go")) == ["let go 0", "let go 2", "let go 3"]


def test_without_a_spare_the_run_is_split_over_fewer_nodes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, STAYS.format(last=1), nodes=3, fits=4)
    first = nodes.trains()
    nodes.processes[1].kill()
    codes, printed = nodes.end()
    assert codes == [0, -9, 0], printed
    second = ranks(nodes.said("start 1"))
    assert sorted(second) == [0, 1, 2, 3] and second[2] == first[4] and second[3] == first[5], "other ranks, as before"


def test_ranks_without_a_place_end(tmp_path: Path) -> None:
    """Of three nodes that are left the layout takes two; the third is a spare."""
    nodes = Nodes(tmp_path, STAYS.format(last=1), nodes=4, fits=4)
    nodes.trains()
    nodes.processes[3].kill()
    codes, printed = nodes.end()
    assert codes == [0, 0, 0, -9] and "nodes: n0, n1; spare nodes left: 1" in printed, printed
    assert len(nodes.said("start 1")) == 4


def test_too_few_nodes_end_the_run(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, STAYS.format(last=1), nodes=2)
    nodes.trains()
    nodes.processes[1].kill()
    codes, printed = nodes.end()
    assert codes == [3, -9] and "1 node is left of the 2 that the run needs" in printed, printed
    assert nodes.said("failed")[0].startswith("failed node n1 is lost") and not nodes.said("let go")


def test_a_lost_agent_ends_the_ranks_of_every_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, STAYS.format(last=1), nodes=2)
    pids = [int(process) for _, process in nodes.trains().values()]
    nodes.processes[0].kill()
    begun = time.monotonic()
    codes, printed = nodes.end()
    assert codes == [-9, 3] and "n1: the run's agent on 127.0.0.1 is lost" in printed, printed
    assert not [pid for pid in pids if born(pid)]
    assert "n1: the copies of the state stay in this node's memory, for the next start" in printed, printed
    assert nodes.said("looked") == ["looked 1 1"] and time.monotonic() - begun < 20, "the job ends, to be queued again"


def test_a_node_that_falls_silent_is_lost_and_ends_its_ranks_when_it_wakes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, STAYS.format(last=1), nodes=3, spares=1, silence=6)
    first = nodes.trains()
    os.kill(nodes.processes[1].pid, signal.SIGSTOP)
    nodes.trains(1)
    os.kill(nodes.processes[1].pid, signal.SIGCONT)
    codes, printed = nodes.end()
    assert codes == [0, 3, 0] and "nothing was heard of it for 6 s" in printed, printed
    assert not born(int(first[2][1])) and not born(int(first[3][1]))


def test_a_node_that_the_run_has_left_waits_until_its_copies_are_of_no_use(tmp_path: Path) -> None:
    """The agent lives, so the others may need them; then they have resumed, and the memory is freed."""
    nodes = Nodes(tmp_path, """
def step(info, kept, number):
    if number == 1:
        until_left(kept, 8)
        return 0
    assert until_left(kept)
""", nodes=3, spares=1, silence=4, looks=3)
    first = nodes.trains()
    os.kill(nodes.processes[1].pid, signal.SIGSTOP)
    nodes.trains(1)
    os.kill(nodes.processes[1].pid, signal.SIGCONT)
    assert nodes.processes[1].wait(6) == 3 and nodes.processes[0].poll() is None, "the run continues"
    assert not born(int(first[2][1])) and not born(int(first[3][1]))
    codes, printed = nodes.end()
    assert codes == [0, 3, 0] and "stay in this node's memory" not in printed, printed
    assert nodes.said("looked") == [f"looked 1 {n}" for n in (1, 2, 3, 4)]


def test_a_node_whose_rank_has_a_damaged_state_gives_its_place_away(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, """
def step(info, kept, number):
    if number == 1:
        if info.rank == 0: say("below", kept.recovery.below)
        return 0
    if info.rank == 2:
        time.sleep(0.3)
        kept.link.lost("rank 2: bit 12", victim=False, step=9, damaged_from=8)
        sys.exit(6)
    assert until_left(kept)
""", nodes=3, spares=1)
    codes, printed = nodes.end()
    assert codes == [0, 0, 0], printed
    assert {node for node, _ in ranks(nodes.said("start 1")).values()} == {"n0", "n2"}
    assert nodes.said("below") == ["below 8"] and "rank 2 failed alone: rank 2: bit 12" in printed


def test_ranks_that_the_watch_takes_for_hung_are_replaced(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, """
def step(info, kept, number):
    if number == 1: return 0
    if info.rank == 3: time.sleep(60)
    if info.rank == 1:
        time.sleep(0.5)
        kept.link.hung([3])
    assert until_left(kept)
""", nodes=2)
    codes, printed = nodes.end()
    assert codes == [0, 0] and "recovery 1: rank 3 hung; ranks that keep their processes: 3" in printed, printed


def test_a_slow_node_gives_its_place_to_a_spare_one_while_there_is_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, """
def step(info, kept, number):
    if number == 0 and info.rank == 0:
        time.sleep(0.5)
        kept.link.slow(3, 1.625)
    if number == 1:
        if info.rank == 0: kept.link.slow(2, 1.9)
        time.sleep(1.0)
        return 0
    assert until_left(kept)
""", nodes=3, spares=1)
    codes, printed = nodes.end()
    assert codes == [0, 0, 0] and "recovery 2" not in printed, printed
    assert "recovery 1: rank 3 on n1 takes 1.62 times as long as its peers; ranks that keep their" in printed, printed
    assert {node for node, _ in ranks(nodes.said("start 1")).values()} == {"n0", "n2"}


def test_a_signal_that_every_node_gets_is_one(tmp_path: Path) -> None:
    """A second one would end the run at once, without a save."""
    nodes = Nodes(tmp_path, """
def step(info, kept, number):
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    say("ready")
    end = time.monotonic() + 20
    while not got and time.monotonic() < end: time.sleep(0.01)
    time.sleep(0.5)
    say("signals", len(got))
    return 85
""", nodes=2)
    nodes.until("ready", 4)
    for process in nodes.processes:
        process.send_signal(signal.SIGUSR1)
    codes, printed = nodes.end()
    assert codes == [85, 85] and nodes.said("signals") == ["signals 1"] * 4, (codes, printed, nodes.said("signals"))


def test_a_node_of_another_version_is_told_so(tmp_path: Path) -> None:
    """Its messages may mean something else."""
    nodes = Nodes(tmp_path, "relay.__version__ = f'0.{place}'\n" + STAYS.format(last=0), nodes=2, wait=4)
    codes, printed = nodes.end()
    assert codes == [3, 3] and "n1 has megatron_port 0.1, and the run's agent 0.0; give all nodes" in printed, printed
    assert "1 of 2 nodes came" in printed


def test_nodes_that_do_not_come_are_counted(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, STAYS.format(last=0), nodes=3, wait=1, come=1)
    codes, printed = nodes.end()
    assert codes == [3] and "1 of 3 nodes came to 127.0.0.1:" in printed and "(n0)" in printed, printed


@pytest.mark.parametrize(("local", "spares", "sign"), [
    (4, 0, "started 4 processes on this node"), (1, 2, "launch.spare_nodes leaves 0 of them"),
])
def test_wrong_starts_are_refused(local: int, spares: int, sign: str) -> None:
    from megatron_port.core.dist.rank import ProcessInfo
    from megatron_port.core.errors import EnvironmentFault
    from megatron_port.run.local_ranks import node_place, nodes_meeting

    info: Any = ProcessInfo(0, 2, 0, local, 0, 2, "h", 1, "slurm", "h")
    with pytest.raises(EnvironmentFault, match=sign):
        nodes_meeting(8, 2 - spares, node_place(info))
