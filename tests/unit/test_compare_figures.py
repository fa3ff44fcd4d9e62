"""The comparison's figures: written one by one, proved by another program, kept when it is killed; power and clocks."""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks.compare import clocks
from benchmarks.compare.clocks import ClockLog, Sample, parse, source_of, summarise
from benchmarks.compare.results import document, hardware, summary, write
from benchmarks.compare.run import Comparison, PeerResult, Plan, judge, kept_peers
from benchmarks.compare.sizes import sizes
from benchmarks.compare.worker import settled

SIZE = sizes()["tiny"]
NUMBERS = {"losses": [5.0, 4.9, 4.8], "grad_norms": [1.0, 1.1, 1.2]}
PEERS = ("ours", "ours-recorded", "torch-compile", "torch")


class Worker:
    """A worker that answers at once. ``asked``: (peer, request), of all."""

    asked: ClassVar[list[tuple[str, str]]] = []
    open: ClassVar[set[str]] = set()
    pause_s = 0.0
    answers: ClassVar[dict[tuple[str, str], dict[str, Any]]] = {}

    def __init__(self, device: str, threads: int) -> None:
        self.peer = "?"

    def ask(self, do: str, *, timeout_s: float, **more: Any) -> dict[str, Any]:
        """Answer as ``worker.Worker`` does."""
        self.peer = more.get("peer", self.peer)
        self.asked.append((self.peer, do))
        time.sleep(self.pause_s)
        now = time.monotonic()
        if (self.peer, do) in self.answers:
            return self.answers[self.peer, do]
        if do == "build":
            self.open.add(self.peer)
            return {"settings": {}, "handicap": "", "favour": ""}
        usual: dict[str, dict[str, Any]] = {
            "check": NUMBERS, "ready": {}, "matmul": {"flops": 1e12, "bandwidth": 1e9, "window": [now, now]},  # type: ignore[dict-item]
            "time": {"seconds": 0.5, "cpu_seconds": 0.5, "memory": 7, "window": [now - 0.1, now]},
        }
        return usual[do]

    def close(self) -> None:
        """The process ends."""
        self.open.discard(self.peer)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[Worker]:
    """A class of workers of this test's own."""
    made = type("Made", (Worker,), {"asked": [], "open": set(), "answers": {}})
    return made


def comparison(worker: type[Worker], out: Path, names: Sequence[str] = PEERS, **plan: Any) -> Comparison:
    """A comparison of ``tiny`` that writes to ``out`` as the command does."""
    about = hardware("cpu", 1)

    def save(made: Comparison) -> None:
        write(out, document([summary(made.size, made.outcomes, made.rates, None, made.plan)], about))

    return Comparison(SIZE, names, Plan("cpu", 1, **plan), say=lambda text: None, save=save, worker=worker)


def figures(out: Path) -> dict[str, int]:
    """Peer → repetitions that a file holds."""
    (size,) = json.loads(out.read_text())["sizes"]
    return {row["peer"]: len(row["seconds"]["all"]) if "seconds" in row else 0 for row in size["peers"]}


def states(out: Path) -> dict[str, str]:
    """Peer → state."""
    (size,) = json.loads(out.read_text())["sizes"]
    return {row["peer"]: row["state"] for row in size["peers"]}


def test_a_figure_is_written_before_anything_else_is_asked(worker: type[Worker], tmp_path: Path) -> None:
    out = tmp_path / "made.json"
    asked = worker.ask

    def ask(self: Worker, do: str, *, timeout_s: float, **more: Any) -> dict[str, Any]:
        times = sum(request == "time" for _, request in worker.asked)
        assert sum(figures(out).values()) == times, worker.asked
        return asked(self, do, timeout_s=timeout_s, **more)

    worker.ask = ask  # type: ignore[method-assign]
    comparison(worker, out, repetitions=3, kept=2).run()
    assert figures(out) == dict.fromkeys(PEERS, 3) and set(states(out).values()) == {"counted"}
    first = [peer for peer, do in worker.asked if do == "time"][:2]
    assert first == ["ours", "ours-recorded"]  # each right after its own check
    at = worker.asked.index(("ours", "check"))
    assert worker.asked[at + 1] == ("ours", "time")


def test_those_that_are_not_kept_come_after_the_others_have_left(worker: type[Worker], tmp_path: Path) -> None:
    together: list[set[str]] = []
    asked = worker.ask

    def ask(self: Worker, do: str, *, timeout_s: float, **more: Any) -> dict[str, Any]:
        answer = asked(self, do, timeout_s=timeout_s, **more)
        if do == "build":
            together.append(set(worker.open))
        return answer

    worker.ask = ask  # type: ignore[method-assign]
    comparison(worker, tmp_path / "made.json", repetitions=2, kept=2).run()
    assert together == [{"ours"}, {"ours", "ours-recorded"}, {"torch-compile"}, {"torch"}] and not worker.open


def test_no_peer_vanishes(worker: type[Worker], tmp_path: Path) -> None:
    out = tmp_path / "made.json"
    worker.answers = {("torch-compile", "build"): {"failed": "no compiler"}, ("torch", "check"): {"cut": "too slow"},
                      ("ours-recorded", "time"): {"unable": "out of memory"}}
    comparison(worker, out, repetitions=2).run()
    assert states(out) == {"ours": "unproved", "ours-recorded": "unable", "torch-compile": "failed", "torch": "cut"}
    comparison(worker, out, ends=time.monotonic() + 1.0).run()  # less than a peer needs
    assert set(states(out).values()) == {"not run"}
    (size,) = json.loads(out.read_text())["sizes"]
    assert all(row["reason"] == "no time was left" for row in size["peers"])


def recorded_limits(worker: type[Worker]) -> dict[tuple[str, str], float]:
    """Record the seconds that each peer is first given for each request."""
    given, asked = dict[tuple[str, str], float](), worker.ask

    def ask(self: Worker, do: str, *, timeout_s: float, **more: Any) -> dict[str, Any]:
        answer = asked(self, do, timeout_s=timeout_s, **more)
        given.setdefault((self.peer, do), timeout_s)
        return answer

    worker.ask = ask  # type: ignore[method-assign]
    return given


def test_a_slow_peer_leaves_the_later_ones_their_time(worker: type[Worker], tmp_path: Path) -> None:
    given = recorded_limits(worker)
    comparison(worker, tmp_path / "made.json", repetitions=1, ends=time.monotonic() + 100.0).run()
    assert [round(given[peer, "check"]) for peer in PEERS] == [76, 84, 92, 100]


def test_plain_torch_proves_where_torch_compile_does_not_end_in_time(worker: type[Worker], tmp_path: Path) -> None:
    out, given = tmp_path / "made.json", recorded_limits(worker)
    worker.answers = {("torch-compile", "check"): {"cut": "no answer to check"}}
    names = ("ours", "torch-compile", "torch-narrow")
    for kept in (1, 2):
        comparison(worker, out, names, repetitions=2, kept=kept, ends=time.monotonic() + 100.0).run()
        assert states(out) == {"ours": "counted", "torch-compile": "cut", "torch-narrow": "counted", "torch": "counted"}
        begun = [peer for peer, do in worker.asked if do == "build"]
        assert begun == ["ours", "torch-compile", "torch", "torch-narrow"] and not worker.open
        worker.asked.clear()
    assert round(given["torch-compile", "check"]) == 88 and round(given["torch", "check"]) == 100
    worker.answers = {}
    comparison(worker, out, names, repetitions=1).run()
    assert "torch" not in states(out) and ("torch", "build") not in worker.asked


def test_a_later_failure_keeps_the_figures_before_it(worker: type[Worker], tmp_path: Path) -> None:
    out = tmp_path / "made.json"
    asked = worker.ask

    def ask(self: Worker, do: str, *, timeout_s: float, **more: Any) -> dict[str, Any]:
        answer = asked(self, do, timeout_s=timeout_s, **more)
        return {"failed": "lost"} if worker.asked.count(("torch", "time")) > 1 and self.peer == "torch" else answer

    worker.ask = ask  # type: ignore[method-assign]
    comparison(worker, out, ("ours", "torch"), repetitions=3).run()
    assert figures(out) == {"ours": 3, "torch": 1} and states(out) == {"ours": "counted", "torch": "counted"}


def _measure(out: Path, pipe: Any) -> None:
    """Compare at some speed, and announce each figure when it should be in the file."""
    made = type("Slow", (Worker,), {"asked": [], "open": set(), "answers": {}, "pause_s": 0.004})
    one = comparison(made, out, repetitions=50)
    one.say = lambda text: pipe.send(text) if "is written" in text else None
    one.run()


def test_a_comparison_that_is_killed_keeps_every_announced_figure(tmp_path: Path) -> None:
    fork, draw, announced = multiprocessing.get_context("fork"), random.Random(3), 0
    for number in range(10):
        out = tmp_path / f"{number}.json"
        reads, writes = fork.Pipe(duplex=False)
        process = fork.Process(target=_measure, args=(out, writes))
        process.start()
        writes.close()
        time.sleep(draw.uniform(0.05, 0.4))
        process.kill()
        process.join()
        said = []
        while reads.poll():
            try:
                said.append(reads.recv())
            except EOFError:
                break
        assert not said or sum(figures(out).values()) >= len(said), said[-1]
        announced += len(said)
    assert announced > 10


def test_without_plain_torch_another_program_proves_and_is_proved() -> None:
    other = {**NUMBERS, "losses": [5.1, 4.9, 4.8]}
    alone = [PeerResult("ours", numbers=NUMBERS)]
    judge(SIZE, alone)
    assert alone[0].state == "unproved"
    pair = [PeerResult("ours", numbers=NUMBERS), PeerResult("torch-compile", numbers=NUMBERS)]
    judge(SIZE, pair)
    assert [o.state for o in pair] == ["counted", "counted"]
    pair = [PeerResult("ours", numbers=NUMBERS), PeerResult("torch-compile", numbers=other)]
    judge(SIZE, pair)
    assert [o.state for o in pair] == ["refused", "unproved"]
    three = [*pair, PeerResult("torch", numbers=NUMBERS)]
    judge(SIZE, three)
    assert [o.state for o in three] == ["counted", "refused", "counted"]


def test_a_peer_says_what_it_lacks_and_what_it_leaves_out() -> None:
    outcomes = [PeerResult("torch", numbers=NUMBERS),
                PeerResult("megatron-core", numbers=NUMBERS, handicap="no engine"),
                PeerResult("torch-narrow", numbers=NUMBERS, favour="no masters")]
    judge(SIZE, outcomes)
    rows = summary(SIZE, outcomes, [], None, Plan("cpu", 1))["peers"]
    assert [row["state"] for row in rows] == ["counted", "handicapped", "counted"]
    assert rows[1]["reason"] == "no engine" and rows[2]["favour"] == "no masters"


@pytest.mark.parametrize("memory, layers", [(150_754_820_096, 6), (85_028_765_696, 3)])
def test_three_peers_of_the_layers_of_a_large_model_stay_together(memory: int, layers: int) -> None:
    names = ("ours-recorded", "torch-compile", "ours", "torch-narrow")
    size = settled(sizes()["6.7b"], {"layers": layers, "global_batch": 16})
    assert kept_peers(size, names, memory) == 3
    small = settled(sizes()["gpt2-xl"], {"layers": 12, "global_batch": 16})
    assert kept_peers(small, names, memory) >= 3
    assert kept_peers(size, names, 0) == 4 and kept_peers(sizes()["6.7b"], names, memory) <= 1


def test_a_step_is_not_thought_smaller_than_the_allocators_peak() -> None:
    """Of 8 layers of 6.7B with micro-batches of 2, on the ghost machine."""
    made = json.loads((Path(__file__).resolve().parents[2] / "benchmarks/results/ghost-budgets.json").read_text())
    row = next(row for name, row in made["sizes"].items() if name == "6.7b") if "sizes" in made else made["6.7b"]
    assert settled(sizes()["6.7b"], {"layers": 8}).step_bytes * 1.125 > row["peak_bytes"]


LINES = """688.20, 1665, 3201, 0x0000000000000004
[N/A], 1665, 3201, 0x0000000000000004

701.00, 1980, 3201, 0x0000000000000000
699.10, 1650, 3201, 0x0000000000000024
"""


def test_a_clock_log_is_read_line_by_line() -> None:
    found = [parse(line, float(i)) for i, line in enumerate(LINES.splitlines())]
    assert found[1] is None and found[2] is None
    assert found[0] == Sample(0.0, 688.2, 1665.0, 3201.0, 4) and found[4] == Sample(4.0, 699.1, 1650.0, 3201.0, 0x24)


def test_a_window_has_medians_and_the_share_of_each_reason() -> None:
    samples = [s for i, line in enumerate(LINES.splitlines()) if (s := parse(line, float(i)))]
    made = summarise(samples, 0.0, 4.0)
    assert made["samples"] == 3 and made["watts"] == {"median": 699.1, "least": 688.2, "most": 701.0}
    assert made["sm_mhz"]["least"] == 1650.0
    assert made["throttled"] == {"power cap": pytest.approx(2 / 3), "heat (software)": pytest.approx(1 / 3)}
    assert summarise(samples, 3.0, 3.5)["throttled"] == {}
    assert summarise(samples, 7.0, 8.0) == {"missing": "the window holds no sample"}


def test_the_log_samples_while_work_runs_and_says_when_it_cannot() -> None:
    class Source:
        def samples(self, stopped: Any) -> Any:
            while not stopped.wait(0.002):
                yield Sample(time.monotonic(), 1.0, 2.0, 3.0, 0)

        def limits(self) -> dict[str, Any]:
            return {}

    with ClockLog(Source()) as log:
        result, made = log.timed(lambda: time.sleep(0.05) or 7)
    assert result == 7 and made["samples"] > 5 and made["sm_mhz"]["median"] == 2.0
    with ClockLog(None, "no driver") as log:
        assert log.between(0.0, 1.0) == {"missing": "no driver"}


SMI = """#!/bin/sh
case "$3" in
*power.limit*) echo "700.00, 1980, 2619, 535.1, Enabled" ;;
*instant*|*event*) echo 'Field "power.draw.instant" is not a valid field to query.'; exit 2 ;;
*) echo "688.20, 1665, 2619, 0x0000000000000004" ;;
esac
"""


def test_an_older_nvidia_smi_is_asked_by_its_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    source = clocks.Smi()
    assert source.query == clocks.QUERIES[1] and source.limits()["power_limit_w"] == 700.0
    (sample,) = source.samples(threading.Event())
    assert (sample.watts, sample.sm_mhz, sample.reasons) == (688.2, 1665.0, 4)
    program.write_text(SMI.replace("688.20, 1665, 2619, 0x0000000000000004", "[N/A], [N/A], 2619, [N/A]"))
    with pytest.raises(clocks.Unavailable, match="no number"):
        clocks.Smi()


def test_without_pynvml_and_nvidia_smi_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(clocks.importlib, "import_module", absent)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(torch.version, "hip", None)
    source, missing = source_of("cuda")
    assert source is None and "No module named 'pynvml'" in missing and "nvidia-smi: FileNotFoundError" in missing
