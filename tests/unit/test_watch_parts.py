"""Parts of the watch: messages, the progress, slow ranks, the file of a hang, and hub and rank over a real socket."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.schema import WatchConfig
from megatron_port.core.dist.process import (
    DATA,
    FORWARD,
    IDLE,
    PHASES,
    REDUCE,
    SAVE,
    START,
    STEP,
    ProgressTracker,
    describe,
)
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.io.logging import ranks_text
from megatron_port.run.processes import born, kill
from megatron_port.run.run_files import add_event
from megatron_port.run.watch import client as client_module
from megatron_port.run.watch import hub_process, wire
from megatron_port.run.watch import rules as judge
from megatron_port.run.watch.client import Client, python_stacks
from megatron_port.run.watch.hub import Hub
from megatron_port.run.watch.hub_process import HubProcess
from megatron_port.run.watch.report import write_hang
from megatron_port.run.watch.rules import Alarm, Beat, Diagnosis, Rank, RankIdentity, Rules, Stragglers
from megatron_port.run.watch.wire import FOREIGN, waits_in

# Messages.


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.integers(), st.text(max_size=20), st.none()), max_size=4), max_size=5), st.data()
)
def test_messages_survive_any_cutting(values: list[list], data: st.DataObject) -> None:
    stream = b"".join(wire.pack("kind", *v) for v in values)
    unpacker, out, at = wire.Unpacker(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        out += unpacker.feed(stream[at : at + size])
        at += size
    assert out == [["kind", *v] for v in values] and unpacker.words == b""


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused_or_kept_as_words(noise: bytes) -> None:
    unpacker = wire.Unpacker(64)
    try:
        for message in unpacker.feed(noise):
            assert isinstance(message[0], str)
    except wire.WireError:
        pass
    assert len(unpacker.words) <= len(noise)


def test_last_words_are_kept_apart_from_messages() -> None:
    unpacker = wire.Unpacker()
    assert unpacker.feed(wire.pack("beat", 1) + b"Fatal Python error: Seg") == [["beat", 1]]
    assert unpacker.feed(b"mentation fault\n" + wire.pack("bye")) == [["bye"]]
    assert unpacker.words == b"Fatal Python error: Segmentation fault\n"


def test_a_length_is_checked_before_anything_is_kept() -> None:
    with pytest.raises(wire.WireError, match="16777215 bytes"):
        wire.Unpacker(1 << 20).feed(bytes((wire.MARK, 255, 255, 255)))


# The progress.


def test_the_pulse_sums_seconds_by_phase_and_step() -> None:
    now = [0.0]
    progress = ProgressTracker(lambda: now[0])

    def take_step(step: int) -> None:
        progress.begin_step(step)
        for phase, seconds in ((DATA, 1.0), (FORWARD, 2.0), (REDUCE, 4.0), (FORWARD, 2.0)):
            progress.at(phase)
            now[0] += seconds
        progress.end_step()

    assert (progress.scope, progress.phase) == (START, START)
    take_step(0)
    assert progress.scope == STEP and progress.steps_done == 1 and progress.step == 1
    with progress.enter(SAVE, "checkpoint"):
        assert (progress.scope, progress.phase) == (SAVE, SAVE) and progress.doing() == "save, checkpoint"
        progress.at(REDUCE)
        now[0] += 100
    assert (progress.scope, progress.phase) == (STEP, IDLE)
    take_step(1)
    assert progress.totals == {**dict.fromkeys(PHASES, 0.0), DATA: 2.0, FORWARD: 8.0, REDUCE: 8.0}
    assert progress.last_seconds[FORWARD] == 4.0 and progress.step_seconds == 18.0


def test_progress_is_seen_and_a_failed_span_stays_readable() -> None:
    progress = ProgressTracker()
    before = progress.counter
    progress.tick("tensor", 3)
    assert progress.counter == before + 1 and progress.doing() == "start, tensor 3"
    with pytest.raises(OSError), progress.enter(SAVE):
        raise OSError
    assert progress.scope == SAVE
    assert describe("save", "save", -1) == "save"


def test_a_span_costs_little() -> None:
    progress, n = ProgressTracker(), 20000
    best = min(_seconds(progress, n) for _ in range(5)) / n
    assert best < 5e-6  # a microsecond on a quiet machine; the test must not fail on a busy one


def _seconds(progress: ProgressTracker, n: int) -> float:
    started = time.perf_counter()
    for i in range(n):
        progress.at(FORWARD, "micro-batch", i)
    return time.perf_counter() - started


# Slow ranks.


def slow_run(
    own: dict[int, float], *, windows: int, stages: dict[int, int] | None = None, named: dict[int, float] | None = None
) -> list:
    """Findings of a run whose ranks work ``own`` seconds per step of 2 s. ``named``: takes what is slow at its end."""
    config = WatchConfig(straggler_steps=10)
    ranks = {
        r: Rank(RankIdentity(r, f"n{r}", 1, 1, f"pp 0, dp {r}, tp 0", (stages or {}).get(r, 0)), 0.0, 0.0) for r in own
    }
    watch, found = Stragglers(config, 0.0), []
    for step in range(1, 10 * (windows + 1) + 2):
        for r, seconds in own.items():
            totals = tuple(step * v for v in (0.1, seconds - 0.1, 0.0, 0.5, 1.0, 0.2))
            beat = Beat(step, STEP, FORWARD, "", -1, 0.0, step, step, 2.0 * step, totals)
            ranks[r].beat = beat
        found += watch.look(ranks.values(), 2.0 * step)
    if named is not None:
        named.update(watch.slow)
    return found


def test_a_slow_rank_is_named_once_after_its_windows() -> None:
    own, early, named = {0: 1.0, 1: 1.02, 2: 1.5, 3: 0.98}, {}, {}
    assert slow_run(own, windows=2, named=early) == [] and not early
    found = slow_run(own, windows=8, named=named)
    assert named == {2: pytest.approx(1.5, rel=0.01)}, "it is slow as long as it is"
    assert [f.place.rank for f in found] == [2]
    assert found[0].score == pytest.approx(1.5, rel=0.01) and found[0].windows == 3
    assert "rank 2 on n2 (pp 0, dp 2, tp 0) takes 1.50 times as long" in found[0].line()
    assert found[0].record()["own_seconds"] == pytest.approx(1.5)


def test_ranks_are_compared_within_their_stage_and_with_the_others() -> None:
    stages = {0: 0, 1: 0, 2: 1, 3: 1}
    assert slow_run({0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}, windows=6, stages=stages) == []
    assert [f.place.rank for f in slow_run({0: 1.0, 1: 1.4, 2: 3.0, 3: 3.0}, windows=6, stages=stages)] == [1]
    assert slow_run({0: 1.0}, windows=6) == []


def test_a_rank_that_recovers_is_told() -> None:
    config = WatchConfig(straggler_steps=1, straggler_windows=1)
    ranks = {r: Rank(RankIdentity(r, "n", 1, 1, "", 0), 0.0, 0.0) for r in range(3)}
    watch, out, totals = Stragglers(config, 0.0), [], dict.fromkeys(ranks, 0.0)
    for step in range(2, 10):
        for r, s in ranks.items():
            totals[r] += 2.0 if r == 1 and step < 6 else 1.0
            by_phase = (0.0, totals[r], 0.0, 0.0, 0.0, 0.0)
            s.beat = Beat(step, STEP, FORWARD, "", -1, 0.0, step, step, 3.0 * step, by_phase)
        out += watch.look(ranks.values(), 6.0 * step)
    assert [(f.place.rank, f.slow) for f in out] == [(1, True), (1, False)]
    assert "as fast as the others again" in out[1].line() and out[1].record()["event"] == "straggler_over"


# Words and files.


def test_ranges_and_waits() -> None:
    assert ranks_text([3, 1, 2, 7]) == "ranks 1-3, 7" and ranks_text([0]) == "rank 0"
    frames = [("/x/megatron_port/a/b.py", 1, "f"), ("/s/torch/distributed/c10d_logger.py", 1, "wrapper"),
              ("/s/torch/distributed/distributed_c10d.py", 2, "broadcast")]
    assert waits_in([("MainThread", frames)]) == "broadcast (a.b.f)"
    assert waits_in([("MainThread", frames[:1])]) == "" and waits_in([]) == ""
    assert waits_in([("MainThread", frames[:1]), (FOREIGN, frames)]) == "broadcast (a.b.f)"  # a backward pass
    assert waits_in([("MainThread", frames[:1]), ("save", frames)]) == ""


def test_stacks_of_this_process() -> None:
    stacks = python_stacks()
    assert all(function != "python_stacks" for _, frames in stacks for _, _, function in frames)
    found: list = []
    thread = threading.Thread(target=lambda: found.extend(python_stacks()))
    thread.start()
    thread.join()
    name, frames = found[0]
    assert name == "MainThread" and frames[-1][2] in ("join", "_wait_for_tstate_lock", "start", "wait")


def test_the_file_of_a_hang(tmp_path: Path) -> None:
    rules = Rules(WatchConfig(), 3, 0.0)
    for r in range(3):
        rules.hello(RankIdentity(r, f"n{r}", 10 + r, 1, f"pp 0, dp {r}, tp 0", 0), 0.0)
        rules.beat(r, Beat(1, STEP, REDUCE, "gradients over dp", -1, 0.0, 12, 12, 1.0, (0.0,) * 6), 1.0)
    rules.ranks[2].heard_at = 9.0
    stacks = {2: [("MainThread", [("/a.py", 3, "f")])]}
    verdict = judge.hang(rules, Alarm("hang", 0, 10.0, ((0, 1.0), (1, 1.0))), stacks, 10.0)
    path = write_hang(tmp_path, verdict, rules.ranks, stacks, now=10.0, raw={0: "Thread 0x1:\n  File b\n"})
    assert path.name.startswith("hang-12-") and [p.name for p in tmp_path.iterdir()] == [path.name]
    text = path.read_text()
    assert 'File "/a.py", line 3, in f' in text and "Stacks of rank 0\n\nThread 0x1:" in text
    assert "rank 1 on n1 (pp 0, dp 1, tp 0), process 11: step 12, reduce, gradients over dp" in text
    assert "No stacks of rank 1" in text and text.count("SILENT") == 2


def test_events_are_lines_and_a_refusing_disk_is_no_error(tmp_path: Path) -> None:
    add_event(tmp_path / "run", {"event": "straggler", "rank": 3})
    add_event(tmp_path / "run", {"event": "straggler", "rank": 4})
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [line["rank"] for line in lines] == [3, 4] and lines[0]["time"] > 0
    (tmp_path / "file").write_text("")
    add_event(tmp_path / "file", {"event": "x"})


def test_only_the_same_process_is_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    start = born(child.pid)
    kill([(child.pid, start + 1), (child.pid, 0)])
    time.sleep(0.05)
    assert child.poll() is None and start > 0
    kill([(child.pid, start)])
    assert child.wait(10) == -9 and born(child.pid) == 0


# Hub and rank over a socket.


class Served:
    """A hub in a thread."""

    def __init__(self, folder: Path, world: int = 2, *, replaces: bool = False, replace_percent: float = 0.0) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.err, self.out = io.StringIO(), io.StringIO()
        setup = {"secret": "s3", "folder": str(folder), "host": "h", "world": world,
                 "config": asdict(WatchConfig(replace_percent=replace_percent)), "replaces": replaces}
        self.hub = Hub(setup, listener, out=self.out, err=self.err)
        self.thread = threading.Thread(target=self.hub.serve, daemon=True)
        self.thread.start()

    def connect(self, rank: int, secret: str = "s3") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.settimeout(10)
        sock.sendall(wire.pack(wire.HELLO, secret, rank, "h", os.getpid(), 0, f"pp 0, dp {rank}, tp 0", 0))
        return sock

    def await_ranks(self, count: int) -> None:
        until = time.monotonic() + 10
        while len(self.hub.rules.ranks) < count and time.monotonic() < until:
            time.sleep(0.01)
        assert len(self.hub.rules.ranks) == count


def test_the_hub_tells_the_others_to_end_when_one_is_lost(tmp_path: Path) -> None:
    served = Served(tmp_path)
    first, second = served.connect(0), served.connect(1)
    served.await_ranks(2)
    second.close()
    unpacker, messages = wire.Unpacker(), []
    while not messages or messages[-1][0] != wire.LEAVE:
        messages += unpacker.feed(first.recv(1000))
    assert messages[-1] == [wire.LEAVE, 3, []]
    assert {m[1][0] for m in messages if m[0] == wire.ROSTER} == {0, 1}  # for the hub that would follow
    first.close()
    served.thread.join(10)
    assert not served.thread.is_alive()
    assert served.err.getvalue().startswith("error: rank 1 on h (pp 0, dp 1, tp 0) is gone at step 0, start")


def test_where_lost_ranks_are_replaced_the_others_are_not_told_to_end(tmp_path: Path) -> None:
    served = Served(tmp_path, replaces=True)
    first, second = served.connect(0), served.connect(1)
    served.await_ranks(2)
    second.close()
    until(lambda: served.err.getvalue())
    assert served.err.getvalue().startswith("error: rank 1 on h (pp 0, dp 1, tp 0) is gone at step 0, start")
    assert not served.hub.leave_until and served.hub.alarm is None, "it watches on"
    first.settimeout(0.2)
    unpacker, kinds, end = wire.Unpacker(), set(), time.monotonic() + 1.2
    while time.monotonic() < end:
        with suppress(TimeoutError):
            kinds |= {message[0] for message in unpacker.feed(first.recv(1000))}
    assert kinds <= {wire.ALIVE, wire.ROSTER}
    first.close()
    served.thread.join(10)
    assert not served.thread.is_alive()


def test_a_hang_whose_ranks_have_all_left_has_no_verdict(tmp_path: Path) -> None:
    served = Served(tmp_path, replaces=True)
    served.connect(0).close()
    until(lambda: served.hub.rules.ranks and not served.hub.rules.ranks[0].here)
    served.hub.alarm, served.hub.collect_until = Alarm("hang", 0, 10.0), 1.0
    served.hub._hang(time.monotonic())
    assert served.hub.alarm is None and not served.hub.collect_until


def test_the_agent_is_told_of_a_hang_by_a_rank_that_hears(tmp_path: Path) -> None:
    """Where lost ranks are replaced the hub ends nobody: the agent reaches every node."""
    served = Served(tmp_path, 3, replaces=True)
    links = [served.connect(rank) for rank in range(3)]
    served.await_ranks(3)
    served.hub.rules.ranks[0].heard_at -= 60  # it is stopped
    served.hub.alarm = Alarm("hang", 0, 10.0)
    now = time.monotonic()
    served.hub._report_hung(Diagnosis(7, (0, 2), "rank 0"), now)
    assert served.hub.reported_until > now + 10, "the others hang too until the agent has acted"
    found = []
    for link in links:
        link.settimeout(1.0)
        unpacker, messages = wire.Unpacker(), []
        with suppress(TimeoutError):
            while not any(message[0] == wire.HUNG for message in messages):
                messages += unpacker.feed(link.recv(1000))
        found.append([message[1:] for message in messages if message[0] == wire.HUNG])
        link.close()
    assert found == [[], [[[0, 2]]], []]


def test_the_agent_is_told_of_the_slowest_rank_in_each_window(tmp_path: Path) -> None:
    served = Served(tmp_path, replaces=True, replace_percent=50.0)
    link = served.connect(0)
    served.await_ranks(1)
    link.settimeout(1.0)
    for slow in ({1: 1.4}, {0: 1.55, 1: 1.75}):
        served.hub.stragglers.slow.update(slow)
        time.sleep(0.6)
    unpacker, messages = wire.Unpacker(), []
    with suppress(TimeoutError):
        while len(messages) < 5:
            messages += unpacker.feed(link.recv(1000))
    assert [message[1:] for message in messages if message[0] == wire.SLOW] == [[1, 1.75]]
    link.close()


@pytest.mark.parametrize("hello", [
    wire.pack(wire.HELLO, "wrong", 0, "h", 1, 0, "", 0), wire.pack(wire.HELLO, "s3", 7, "h", 1, 0, "", 0),
    wire.pack(wire.HELLO, "s3"), wire.pack(wire.BEAT, 1), b"GET / HTTP/1.1\r\n\r\n" + bytes((1, 255, 255, 255)),
    wire.pack(wire.HELLO, "s3" + "x" * 2000),
])
def test_strangers_are_shown_out(tmp_path: Path, hello: bytes) -> None:
    served = Served(tmp_path)
    real = served.connect(0)
    served.await_ranks(1)
    with socket.create_connection(("127.0.0.1", served.port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(hello)
        assert stranger.recv(10) == b""
    assert list(served.hub.rules.ranks) == [0]
    real.sendall(wire.pack(wire.BYE))
    real.close()
    served.thread.join(10)
    assert served.err.getvalue() == ""


def test_a_rank_beats_answers_and_leaves(tmp_path: Path) -> None:
    served, progress, notes, hung = Served(tmp_path, world=1), ProgressTracker(), [], []
    agent = SimpleNamespace(hung=hung.append, slow=lambda rank, ratio: hung.append((rank, ratio)))
    client = Client(progress, rank=0, host="h", coords="pp 0, dp 0, tp 0", stage=0, address="127.0.0.1",
                    port=served.port, secret="s3", note=notes.append, agent=agent)
    served.await_ranks(1)
    progress.begin_step(4)
    progress.at(FORWARD, "micro-batch", 2)
    client.beat()
    until = time.monotonic() + 10
    while served.hub.rules.ranks[0].beat.number != 2 and time.monotonic() < until:
        time.sleep(0.01)
    beat = served.hub.rules.ranks[0].beat
    assert replace(beat, age=0.0, counter=0) == Beat(0, START, FORWARD, "micro-batch", 2, 0.0, 4, 0, 0.0, (0.0,) * 6)
    served.hub._order(wire.ASK)
    while 0 not in served.hub.stacks and time.monotonic() < until:
        time.sleep(0.01)
    assert any("test_a_rank_beats" in frame[2] for _, frames in served.hub.stacks[0] for frame in frames)
    served.hub.links[0].send(wire.pack(wire.HUNG, [3, 5]))
    served.hub.links[0].send(wire.pack(wire.SLOW, 6, 1.5))
    while len(hung) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert hung == [[3, 5], (6, 1.5)], "its agent is told"
    client.close()
    served.thread.join(10)
    assert not served.thread.is_alive() and notes == [] and served.err.getvalue() == ""


def test_a_hub_that_goes_is_noted_and_nothing_else(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    notes: list[str] = []
    client = Client(ProgressTracker(), rank=0, host="h", coords="", stage=0, address="127.0.0.1",
                    port=listener.getsockname()[1], secret="s", note=notes.append)
    first = listener.accept()[0]
    listener.close()  # with rank 0's process
    first.close()
    client._thread.join(10)
    assert len(notes) == 1 and "the run continues without it" in notes[0] and client.spoken.is_set()
    client.close()


# The hub's process.


def a_rank(number: int, world: int = 2) -> ProcessInfo:
    return ProcessInfo(
        rank=number, world_size=world, local_rank=number, local_world_size=world, node_rank=0, num_nodes=1,
        master_addr="127.0.0.1", master_port=0, launcher="single", hostname="h",
    )


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_hub_that_is_killed_or_stopped_is_replaced_and_misses_who_does_not_return(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Two real processes in the hub's place, one after the other; rank 1 was stopped before the second came."""
    monkeypatch.setitem(client_module.SILENCE_S, True, 2.0)
    process = HubProcess(WatchConfig(hang_seconds=3.0), a_rank(0), tmp_path)
    request.addfinalizer(process._kill)  # a test that fails must not leave a stopped process
    process.start()
    progress, notes = ProgressTracker(), []
    progress.begin_step(7)
    progress.end_step()
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    client = Client(progress, rank=0, host="h", coords="pp 0, dp 0, tp 0", stage=0, note=notes.append, hub=process,
                    **process.where)
    other = socket.create_connection(("127.0.0.1", process.where["port"]))
    other.sendall(wire.pack(wire.HELLO, process.where["secret"], 1, "h2", 1, 0, "pp 0, dp 1, tp 0", 0))
    until(lambda: set(client._roster) == {0, 1})
    number, first = client.sock.fileno(), process.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    until(lambda: notes)
    assert notes == ["the watch was started again: it was stopped or hung"] and not Path(f"/proc/{first}").exists()
    second = process.pid
    assert second is not None
    assert client.sock.fileno() == number  # the signal handlers write there
    other.close()
    until(lambda: client._heard and not client.spoken.is_set())
    os.kill(second, signal.SIGKILL)
    until(lambda: len(notes) == 2)
    assert notes[1] == "the watch was started again: it was killed by signal 9"
    until(lambda: left)  # told to end
    client.close()
    process.end()
    assert left == [7]
    said = capfd.readouterr().err
    assert "error: rank 1 on h2 (pp 0, dp 1, tp 0) made no progress for" in said
    assert "at a place unknown since the watch was started again" in said and "no heartbeat for" in said


def test_a_hub_is_not_replaced_for_ever_nor_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = HubProcess(WatchConfig(), a_rank(0), tmp_path)
    monkeypatch.setattr(process, "start", lambda roster=(): None)
    for _ in range(hub_process.MOST_RESTARTS):
        process.restart([])
    with pytest.raises(OSError, match="started again 10 times"):
        process.restart([])
    process.end()
    with pytest.raises(OSError, match="the run is ending"):
        process.restart([])


def test_a_rank_that_connects_anew_replaces_itself_and_nobody_else(tmp_path: Path) -> None:
    served = Served(tmp_path)
    first = served.connect(0)
    served.await_ranks(1)
    again = served.connect(0)
    assert first.fileno() >= 0  # open: nobody has said goodbye
    unpacker, words = wire.Unpacker(), []
    while [wire.ALIVE] not in words:  # by which ranks know that the hub lives
        words += unpacker.feed(again.recv(1000))
    until(lambda: served.hub.links[0].sock.getpeername() == again.getsockname())
    stranger = socket.create_connection(("127.0.0.1", served.port))
    stranger.settimeout(10)
    stranger.sendall(wire.pack(wire.HELLO, "s3", 0, "h", 1, 5, "pp 0, dp 0, tp 0", 0))
    assert stranger.recv(10) == b""
    assert served.hub.rules.ranks[0].closed_at is None
    again.sendall(wire.pack(wire.BYE))
    again.close()
    served.thread.join(10)
    assert served.err.getvalue() == ""


def test_the_hub_starts_without_torch() -> None:
    """It would hold 200 MB and start seconds later: a rank that is lost by then is not seen to be."""
    code = "import sys, megatron_port.run.watch.hub; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
