"""The agent of a node, with ranks that do nothing but what a test says: who is started again, and when the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
from megatron_port.run import agent
from megatron_port.run.agent_link import KeptRank
from megatron_port.core.errors import NumericsError
log = open(sys.argv[1], "a", buffering=1)
def say(*words): log.write(" ".join(map(str, words)) + "\\n")
def wait_to_leave(kept, seconds=20):
    left = []
    kept.link.leave = lambda lost: left.append(1)
    end = time.monotonic() + seconds
    while not left and time.monotonic() < end: time.sleep(0.01)
    return bool(left)
def leave_and_wait(kept, step):
    following = kept.link.lost("a peer", victim=True, step=step)
    if following is None: sys.exit(3)
    kept.recovery = following[1]
{body}
sys.exit(agent.run_kept({nproc}, rank, lambda: say("let go")))
"""


def run(tmp_path: Path, nproc: int, body: str, *, seconds: float = 40) -> tuple[int, list[str], str]:
    """Exit code, what was logged, and what was printed."""
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(body=body, nproc=nproc), str(log)],
                          capture_output=True, text=True, timeout=seconds, check=False)
    return done.returncode, log.read_text().splitlines() if log.exists() else [], done.stdout + done.stderr


def test_a_lost_rank_is_started_again_and_the_others_keep_their_processes(tmp_path: Path) -> None:
    code, said, printed = run(tmp_path, 3, """
def rank(info, kept):
    mine = os.getpid()
    while True:
        say("start", info.rank, kept.recovery.number if kept.recovery else 0, "same" if mine == os.getpid() else "")
        kept.link.running(7, 3)
        if kept.recovery:
            say("told", info.rank, kept.recovery.first_epoch, kept.recovery.step, kept.recovery.why)
            time.sleep(0.2)
            return 0
        if info.rank == 1:
            time.sleep(0.3)
            os.kill(mine, signal.SIGKILL)
        assert wait_to_leave(kept)
        leave_and_wait(kept, 8)
""")
    assert code == 0, printed
    assert sorted(line for line in said if line.startswith("start")) == [
        "start 0 0 same", "start 0 1 same", "start 1 0 same", "start 1 1 same", "start 2 0 same", "start 2 1 same"]
    assert said.count("told 1 3 8 rank 1 was killed by SIGKILL") == 1 and said[-1] == "let go"
    assert "recovery 1: rank 1 was killed by SIGKILL; ranks that keep their processes: 2, that are started" in printed


def test_a_rank_that_fails_alone_is_replaced_however_long_the_others_compute(tmp_path: Path) -> None:
    code, said, printed = run(tmp_path, 2, """
def rank(info, kept):
    while True:
        kept.link.running(1, 1)
        if kept.recovery: return 0
        if info.rank == 0:
            time.sleep(0.2)
            assert kept.link.lost("KeyError: 'x'", victim=False, step=1) is None
            say("raised")
            return 1
        assert wait_to_leave(kept)
        time.sleep(2.5)
        leave_and_wait(kept, 1)
""")
    assert code == 0 and said == ["raised", "let go"], printed
    assert "rank 0 failed alone: KeyError: 'x'; ranks that keep their processes: 1" in printed
    assert "although all processes live" not in printed


def test_an_error_of_all_ranks_ends_the_run(tmp_path: Path) -> None:
    code, said, printed = run(tmp_path, 2, """
def rank(info, kept):
    kept.link.running(1, 1)
    time.sleep(0.4 * info.rank)
    assert kept.link.lost("not finite", victim=False, step=1) is None
    say("raised")
    return 6
""")
    assert code == 6 and said == ["raised", "raised", "let go"] and "recovery" not in printed


def test_copies_that_could_not_be_saved_stay_for_the_next_start(tmp_path: Path) -> None:
    """All ranks fail alike, after a recovery; the others' reports say nothing of copies."""
    code, said, printed = run(tmp_path, 2, """
def rank(info, kept):
    kept.link.running(1, 1)
    if info.rank == 0 and not kept.recovery:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    if not kept.recovery:
        assert wait_to_leave(kept)
        leave_and_wait(kept, 1)
    assert kept.link.lost("no space left", victim=False, step=1, keeps=info.rank == 0) is None
    return 3
""")
    assert code == 3 and "let go" not in said and printed.count("recovery") == 1, printed


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_loss_that_comes_back_ends_the_run_and_the_copies_stay(tmp_path: Path, nproc: int) -> None:
    code, said, printed = run(tmp_path, nproc, """
def rank(info, kept):
    while True:
        kept.link.running(3, 1)
        say("start", info.rank)
        if info.rank == 0:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        assert wait_to_leave(kept)
        leave_and_wait(kept, 3)
""")
    assert code == 3 and said.count("start 0") == 4 and "let go" not in said, printed
    assert "the 4th loss since a copy or checkpoint of step 3 was the newest" in printed


def test_steps_that_are_taken_again_do_not_count_as_one(tmp_path: Path) -> None:
    """After a rewind the steps are lower than the furthest."""
    code, said, printed = run(tmp_path, 1, """
def rank(info, kept):
    number = kept.recovery.number if kept.recovery else 0
    kept.link.running([1900, 1300, 1500, 1700, 1800, 1810][number], 1)
    if number == 5: return 0
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    assert code == 0 and "recovery 5" in printed and said == ["let go"]


def test_a_stopped_rank_is_replaced_in_a_recovery(tmp_path: Path) -> None:
    code, _, printed = run(tmp_path, 3, """
def rank(info, kept):
    while True:
        kept.link.running(3, 1)
        if kept.recovery: return 0
        if info.rank == 2:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGSTOP)
        if info.rank == 1:
            time.sleep(0.4)
            os.kill(os.getpid(), signal.SIGKILL)
        assert wait_to_leave(kept)
        leave_and_wait(kept, 3)
""")
    assert code == 0 and "rank 1 was killed by SIGKILL; rank 2 is stopped; ranks that keep their process" in printed


def test_a_signal_during_a_recovery_waits_until_the_ranks_can_save(tmp_path: Path) -> None:
    body = """
def rank(info, kept):
    while True:
        stop = []
        for number in (signal.SIGTERM, signal.SIGUSR1): signal.signal(number, lambda n, f: stop.append(n))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))  # as train.loop does
        kept.link.running(3, 1)
        say("start", info.rank)
        if info.rank == 1 and not kept.recovery:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if not kept.recovery:
            assert wait_to_leave(kept)
            time.sleep(1.0)
            leave_and_wait(kept, 3)
            if kept.recovery: continue
        end = time.monotonic() + 10
        while not stop and time.monotonic() < end: time.sleep(0.01)
        say("saved", info.rank, *stop)
        return 85 if info.rank == 0 else 0
"""
    log = tmp_path / "log"
    agent = subprocess.Popen([sys.executable, "-c", PROGRAM.format(body=body, nproc=2), str(log)],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not log.exists() or log.read_text().count("start") < 2:
        time.sleep(0.01)
    time.sleep(0.8)  # rank 1 has died, rank 0 is on its way out of the step
    os.kill(agent.pid, signal.SIGUSR1)
    printed, _ = agent.communicate(timeout=30)
    said = log.read_text().splitlines()
    number = int(signal.SIGUSR1)
    assert agent.returncode == 85, printed
    assert sorted(said[-3:]) == ["let go", f"saved 0 {number}", f"saved 1 {number}"] or (
        sorted(said[-2:]) == [f"saved 0 {number}", f"saved 1 {number}"]), said


def test_signals_are_not_taken_by_the_links_thread(tmp_path: Path) -> None:
    """One that the main thread defers would end the process there."""
    code, said, printed = run(tmp_path, 1, """
def rank(info, kept):
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.3)
    say("deferred", signal.SIGTERM in signal.sigpending())
    kept.link.running(1, 1)
    return 0
""")
    assert code == 0 and said == ["deferred True", "let go"], printed


def test_a_start_that_never_trained_lets_nothing_go(tmp_path: Path) -> None:
    """The folder may be in use by another job, whose copies they are."""
    code, said, _ = run(tmp_path, 2, """
def rank(info, kept):
    assert kept.link.lost("in use", victim=False, step=0) is None
    return 2
""")
    assert code == 2 and said == []


def test_a_signal_while_ranks_wait_for_the_verdict_ends_the_run(tmp_path: Path) -> None:
    body = """
def rank(info, kept):
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    kept.link.running(3, 1)
    say("start", info.rank)
    time.sleep(0.2)
    assert kept.link.lost("not finite", victim=False, step=3) is None
    return 6
"""
    log = tmp_path / "log"
    agent = subprocess.Popen([sys.executable, "-c", PROGRAM.format(body=body, nproc=2), str(log)],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not log.exists() or log.read_text().count("start") < 2:
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(agent.pid, signal.SIGTERM)
    printed, _ = agent.communicate(timeout=20)
    assert agent.returncode == 6, printed


def test_a_rank_that_hangs_while_the_run_ends_is_ended(tmp_path: Path) -> None:
    """The watch only tells the agent, and nobody else would."""
    code, _, printed = run(tmp_path, 2, """
def rank(info, kept):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    kept.link.running(1, 1)
    if info.rank == 0:
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGUSR1)
    while not got: time.sleep(0.01)
    if info.rank == 1: time.sleep(60)
    time.sleep(0.3)
    kept.link.hung([1])
    time.sleep(0.5)
    return 85
""")
    assert code == 7 and "error: rank 1 hung while the run was ending" in printed, (code, printed)
