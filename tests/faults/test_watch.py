"""Real runs with a rank that stops, sleeps, deadlocks, crashes or vanishes: who is named, when, and what is left.

Each case is ``megatron-port train --nproc`` in a session of its own; the fault comes from outside of the package
(``fault_hook``). Cases run three at a time, as most of their time is waiting.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from commands import Commands
from control_group import little_memory
from fault_hook import write_hook

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 10.0
"""watch.hang_seconds of these runs: the default."""
DOWN_S = 10.0
"""A dead rank takes everything down within this time."""
STEP = 3
T = TypeVar("T", bound=Callable)
ERROR = re.compile(r"^error:(?!.* SIG(KILL|SEGV)$).*\n", re.MULTILINE)
"""What the watch or a rank says, not the process that has the ranks."""

RUN_FILE = """
name = "run"
engine = "{engine}"
output_dir = "{folder}/runs"
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 4
vocab_size = 300
seq_length = 32
[layout]
zero_stage = {zero}
pipeline_parallel_size = {pp}
vocab_padding_multiple = 8
[batch]
micro_batch_size = 2
global_batch_size = 8
[precision]
dtype = "fp32"
[data]
synthetic = true
[training]
steps = {steps}
[checkpoint]
save_final = false
[watch]
connect_seconds = 10
straggler_steps = 10
straggler_windows = 1
"""


@dataclass
class Ending:
    """How a run with a fault ended. Times in seconds since the fault."""

    code: int
    output: str
    folder: Path
    error_after: float
    """Until the first line that begins with ``error:``."""
    ended_after: float
    left: list[int] = field(default_factory=list)
    """Processes of the session that live on a second later."""
    shared_memory: set[str] = field(default_factory=set)

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error:")]

    @property
    def hang_file(self) -> str:
        found = list((self.folder / "runs" / "run").glob("hang-*.txt"))
        assert len(found) == 1, self.output
        return found[0].read_text()


def shared_memory() -> set[str]:
    """Names in /dev/shm of this user."""
    return {p.name for p in Path("/dev/shm").glob("*") if p.stat().st_uid == os.getuid()}


def run(
    commands: Commands, folder: Path, kind: str, *, rank: int, nproc: int = 2, engine: str = "native",
    slow: float = 0.0, steps: int = 1000, group: str = "",
) -> Ending:
    """One run to its end."""
    hook = write_hook(folder / "hook", kind=kind, rank=rank, step=STEP, slow=slow, group=group)
    (folder / "run.toml").write_text(RUN_FILE.format(
        engine=engine, folder=folder, zero=int(engine == "deepspeed"), pp=2 if nproc > 2 else 1, steps=steps
    ))
    before = shared_memory()
    command = commands.start("train", str(folder / "run.toml"), "--nproc", str(nproc), load="fault_in_loop",
                             env={"PYTHONPATH": f"{hook}:{ROOT}"})
    error_at, until = 0.0, time.monotonic() + 180
    try:
        while (code := command.poll()) is None and time.monotonic() < until:
            error_at = error_at or (time.time() if ERROR.search(command.output()) else 0.0)
            time.sleep(0.02)
        ended_at = time.time()
        assert code is not None, f"it has not ended\n{command.output()}"
        error_at = error_at or (ended_at if ERROR.search(command.output()) else 0.0)
        command.all_down(1.0)
        left = command.living()
    finally:
        command.end()
    fired = json.loads((hook / "fired").read_text())[0] if (hook / "fired").exists() else ended_at
    mine = {name for name in shared_memory() - before if "megatron" in name or "torch" in name or "gloo" in name}
    return Ending(code, command.output(), folder, error_at - fired, ended_at - fired, left, mine)


CASES: dict[str, dict[str, Any]] = {
    "stop": {"rank": 1},
    "stop-rank-0": {"kind": "stop", "rank": 0},
    "gil": {"rank": 1},
    "sleep": {"rank": 3, "nproc": 4},
    "deadlock": {"rank": 1},
    "segfault": {"rank": 1},
    "exit": {"rank": 0},
    "kill": {"rank": 3, "nproc": 4},
    "error": {"rank": 1},
    "bug": {"rank": 1},
    "hub-killed": {"rank": 1},
    "hub-stopped": {"rank": 0},
    "connect": {"rank": 1},
    "slow": {"kind": "", "rank": 1, "slow": 0.15, "steps": 60},
}


def uses(name: str) -> Callable[[T], T]:
    """The case that a test looks at."""

    def mark(test: T) -> T:
        test.case = name  # type: ignore[attr-defined]
        return test

    return mark


@pytest.fixture(scope="module")
def endings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, commands: Commands
) -> Iterator[dict[str, Future[Ending]]]:
    """The cases of all tests that will run, begun."""
    wanted = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module and not item.get_closest_marker("skip"):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            wanted.append(params.get("name") or getattr(item.function, "case", ""))
    with ThreadPoolExecutor(3) as pool:
        yield {
            name: pool.submit(run, commands, tmp_path_factory.mktemp(name),
                              **{"kind": name, **options})
            for name, options in CASES.items() if name in wanted
        }


def ending(endings: dict[str, Future[Ending]], name: str) -> Ending:
    """Of one case, with what must hold of all: said once, nothing left, no victim heard."""
    found = endings[name].result(200)
    assert found.left == [], found.output
    assert not found.shared_memory
    assert "lost contact with a peer" not in found.output
    watched = [line for line in found.errors if "was killed by" not in line]
    assert len(watched) == 1, found.output
    return found


def assert_hang(found: Ending, rank: int, coords: str, ranks: int) -> str:
    """Exit 7 in time, with the rank named on the console and in the file; the message."""
    assert found.code == 7, found.output
    assert 0 < found.error_after < LIMIT_S + 1, (found.error_after, found.output)
    assert found.ended_after < LIMIT_S + 10
    message = found.errors[0]
    assert re.match(rf"error: rank {rank} on \S+ \({coords}\) made no progress for", message), found.output
    text = found.hang_file
    assert text.splitlines()[0] == message.removeprefix("error: ")
    assert len(re.findall(r"^rank \d+ on \S+ \(pp .*process \d+: ", text, re.MULTILINE)) == ranks
    return message


@uses("stop")
def test_a_stopped_rank_is_named(endings: dict[str, Future[Ending]]) -> None:
    found = ending(endings, "stop")
    message = assert_hang(found, 1, "pp 0, dp 1, tp 0", 2)
    assert f"step {STEP}, data, samples from {STEP * 8}" in message and "no heartbeat for" in message
    text = found.hang_file
    # Rank 0 waits for the reduce-scatters that it has started: no collective's own frame, but the engine's.
    assert "Stacks of rank 0" in text and re.search(r"optim/sharded\.py\", line \d+, in finish", text), text
    assert "No stacks of rank 1" in text and "SILENT" in text


@pytest.mark.slow
@uses("stop-rank-0")
def test_a_stopped_rank_0_is_named_too(endings: dict[str, Future[Ending]]) -> None:
    found = ending(endings, "stop-rank-0")
    assert "no heartbeat for" in assert_hang(found, 0, "pp 0, dp 0, tp 0", 2)
    assert "Stacks of rank 1" in found.hang_file


@pytest.mark.slow
@uses("gil")
def test_a_rank_whose_interpreter_is_stuck_is_named_with_its_stack(endings: dict[str, Future[Ending]]) -> None:
    found = ending(endings, "gil")
    assert "no heartbeat for" in assert_hang(found, 1, "pp 0, dp 1, tp 0", 2)
    assert "Stacks of rank 1" in found.hang_file and "re/__init__.py" in found.hang_file


@uses("sleep")
def test_a_loader_that_sleeps_is_named(endings: dict[str, Future[Ending]]) -> None:
    found = ending(endings, "sleep")
    message = assert_hang(found, 3, "pp 1, dp 1, tp 0", 4)
    assert f"step {STEP}, data, samples from {STEP * 8}" in message and "fault_in_loop.py" in message
    assert "in act" in found.hang_file and "No stacks" not in found.hang_file


@pytest.mark.parametrize(("name", "became"), [
    pytest.param("hub-killed", "killed by signal 9", marks=pytest.mark.slow),
    pytest.param("hub-stopped", "stopped or hung", marks=pytest.mark.slow),
])
def test_the_watch_survives_its_own_process(
    endings: dict[str, Future[Ending]], name: str, became: str
) -> None:
    """The watch's process is killed or stopped; then a rank is stopped, rank 0 even, which started the next one."""
    found, rank = ending(endings, name), CASES[name]["rank"]
    message = assert_hang(found, rank, f"pp 0, dp {rank}, tp 0", 2)
    assert f"step {STEP}, data, samples from {STEP * 8}" in message and "no heartbeat for" in message
    assert f"the watch was started again: it was {became}" in found.output
    assert "the run continues without it" not in found.output


@uses("connect")
def test_a_rank_that_hangs_while_communicators_are_made_is_named(endings: dict[str, Future[Ending]]) -> None:
    found = ending(endings, "connect")
    message = assert_hang(found, 1, "pp 0, dp 1, tp 0", 2)
    assert "at step 0, start, communicator dp (ranks 0-1)" in message and "no heartbeat for" in message
    assert "rank 0 waits in start, communicator dp (ranks 0-1)" in found.output


@uses("deadlock")
def test_mismatched_collectives_are_named(endings: dict[str, Future[Ending]]) -> None:
    found = ending(endings, "deadlock")
    message = assert_hang(found, 1, "pp 0, dp 1, tp 0", 2)
    assert "wait for one another in different operations; this one in barrier" in message
    assert "rank 0 waits in reduce, gradients over the replicas" in found.output
    assert "in barrier" in found.hang_file and "Stacks of rank 0" in found.hang_file


@pytest.mark.parametrize(
    ("name", "code", "place", "reason"),
    [
        ("segfault", 128 + signal.SIGSEGV, r"rank 1 on \S+ \(pp 0, dp 1, tp 0\)", "Segmentation fault"),
        ("exit", 3, r"rank 0 on \S+ \(pp 0, dp 0, tp 0\)", "it ended without a word"),
        ("kill", 128 + signal.SIGKILL, r"rank 3 on \S+ \(pp 1, dp 1, tp 0\)", "it ended without a word"),
    ],
)
def test_a_dead_rank_is_named_and_takes_all_down(
    endings: dict[str, Future[Ending]], name: str, code: int, place: str, reason: str
) -> None:
    found = ending(endings, name)
    assert found.code == code, found.output
    message = next(line for line in found.errors if "was killed by" not in line)
    assert re.match(rf"error: {place} is gone at step {STEP}, data, samples from {STEP * 8} ", message), found.output
    assert reason in message
    assert 0 < found.error_after < 5
    assert found.ended_after < DOWN_S
    if name == "segfault":
        assert "fault_in_loop.py" in found.output and "in string_at" in found.output


@pytest.mark.parametrize(("name", "text"), [
    ("error", "a fault of this rank alone"), pytest.param("bug", "KeyError: 'a bug", marks=pytest.mark.slow),
])
def test_an_error_of_one_rank_is_told_with_its_name(
    endings: dict[str, Future[Ending]], name: str, text: str
) -> None:
    found = ending(endings, name)
    assert found.code == 1, found.output
    message = found.errors[0]
    assert re.match(rf"error: rank 1 on \S+ \(pp 0, dp 1, tp 0\) failed at step {STEP}, data", message), found.output
    assert text in message
    assert "Traceback" not in found.output
    if name == "bug":
        place = re.search(r"its traceback is in (\S+),", found.output)
        assert place and "KeyError: 'a bug" in Path(place[1]).read_text()


@uses("slow")
def test_a_slow_rank_is_named_and_the_run_goes_on(endings: dict[str, Future[Ending]]) -> None:
    found = endings["slow"].result(200)
    assert found.code == 0 and found.left == [] and not found.shared_memory, found.output
    lines = [line for line in found.output.splitlines() if line.startswith("straggler:")]
    assert lines and re.match(r"straggler: rank 1 on \S+ \(pp 0, dp 1, tp 0\) takes \S+ times as long", lines[0])
    assert "most of it in forward" in lines[0]
    events = [json.loads(line) for line in (found.folder / "runs" / "run" / "events.jsonl").read_text().splitlines()]
    events = [e for e in events if e["event"].startswith("straggler")]
    assert [e["rank"] for e in events] == [1] and events[0]["event"] == "straggler" and events[0]["score"] > 1.25
    assert events[0]["phases"]["forward"] > 0.3 > events[0]["peer_seconds"]


@pytest.fixture
def small_memory() -> Iterator[Path]:
    with little_memory(64 << 20) as group:
        yield group


def test_a_rank_killed_for_memory_is_named_with_the_reason(
    small_memory: Path, tmp_path: Path, commands: Commands
) -> None:
    found = run(commands, tmp_path, "memory", rank=1, group=str(small_memory))
    assert found.code == 128 + signal.SIGKILL and found.left == [], found.output
    message = next(line for line in found.errors if "is gone" in line)
    assert re.match(rf"error: rank 1 on \S+ \(pp 0, dp 1, tp 0\) is gone at step {STEP}, data", message), found.output
    assert "has killed a process for lack of memory" in message
    assert found.ended_after < DOWN_S
