"""A session on a GPU: what is kept of each part, what is said of it, and how calls are timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_env
import gpu_session
import gpu_train
import psutil
import pytest
import torch
from gpu_summary import data_of, headline, summary_table
from part_runner import Part, run, run_all

from benchmarks.compare import child, recorded
from benchmarks.compare.clocks import ClockLog
from benchmarks.compare.peer import PEERS
from benchmarks.compare.recorded import differences
from benchmarks.compare.sizes import sizes
from benchmarks.device_clock import CACHES, MOST_COPIES, copies_of, last_cache_bytes, time_calls

CPU = torch.device("cpu")
JUNIT = """<testsuites><testsuite tests="5" failures="1" errors="0" skipped="2" time="3.5">
<testcase classname="tests.kernels.test_norm" name="test_rms_norm[gpu]"><failure message="error 3e-2"
>x</failure></testcase>
<testcase classname="tests.kernels.test_norm" name="test_layer_norm[gpu]"/></testsuite></testsuites>"""


H200, H100 = 150_754_820_096, 85_028_765_696


def setting(folder: Path, memory: int = H200, tiny: bool = False) -> gpu_session.Setting:
    """A session on a card of so many bytes."""
    return gpu_session.Setting(folder, "cuda", memory, tiny, "nvidia-h200" if memory == H200 else "nvidia-h100")


def test_every_part_is_in_the_file_before_the_next_one_starts(tmp_path: Path) -> None:
    compared = [sys.executable, "-c", "pass", "--sizes", "6.7b", "--peers", "ours", "torch"]
    path = tmp_path / "gpu-session-cpu-a.json"
    look = f"import json; print([r['exit'] for r in json.load(open({str(path)!r}))['parts'].values()])"
    wanted = [Part("first", [sys.executable, "-c", "print('why'); raise SystemExit(7)"], 60.0),
              Part("second", ["sleep", "60"], 0.1), Part("third", [sys.executable, "-c", look], 60.0),
              Part("compare-6.7b", compared, 60.0)]
    at = gpu_session.Setting(tmp_path, "cpu", 0, True, "cpu")
    record = gpu_session.Record("a", at, ["a"], wanted)
    made = json.loads(path.read_text())
    assert record.path == path and made["card"] == {"name": "cpu", "kind": "cpu"}
    assert made["command"] == "scripts/gpu_session.sh a" and all(row["command"] for row in made["parts"].values())
    assert {row["state"] for row in made["parts"].values()} == {"not run yet"}
    run_all(wanted, tmp_path, None, after=record.take)
    assert (tmp_path / "third.txt").read_text() == "[7, 124, None, None]\n"
    made = json.loads(path.read_text())
    assert [row["exit"] for row in made["parts"].values()] == [7, 124, 0, 0]
    assert "why" in made["parts"]["first"]["tail"]
    table = summary_table(made)
    assert "| first | failed (exit 7) |" in table and "not done after 0.1 s" in table
    assert "ours [not run]; torch [not run]" in table  # a part that left no file loses no row


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("memory", [H200, H100])
def test_parts_fit_their_command_and_each_writes_where_its_result_is_looked_for(
    tmp_path: Path, which: str, memory: int
) -> None:
    for tiny in (False, True):
        wanted = gpu_session.parts(which, setting(tmp_path, memory, tiny))
        kept = gpu_session.START_S + gpu_session.RESERVE_S
        assert sum(p.least_s for p in wanted) <= gpu_session.SECONDS[which] - kept
        for part in wanted:
            assert part.least_s < part.limit_s
            files = [word for word in part.command if word.startswith(str(tmp_path)) and word.endswith(".json")]
            assert not files or files[-1] == str(tmp_path / f"{part.name}.json"), part


def test_what_matters_most_comes_first(tmp_path: Path) -> None:
    names = [p.name for p in gpu_session.parts("a", setting(tmp_path))]
    assert names == ["env", "kernels", "recorded", "compare-6.7b", "compare-gpt2-xl", "compare-gpt2-124m", "ops",
                     "epilogues"]
    names = [p.name for p in gpu_session.parts("b", setting(tmp_path))]
    assert names == ["profile", "train", "experts", "engine", "layouts", "compare-xl-48", "compare-llama-8b",
                     "compare-llama-8b-long", "calibrate"]


def after(command: list[str], option: str) -> str:
    """The word after an option."""
    return command[command.index(option) + 1]


@pytest.mark.parametrize("memory, layers, llama", [(H200, "6", "4"), (H100, "3", "2")])
def test_sizes_are_chosen_by_memory(tmp_path: Path, memory: int, layers: str, llama: str) -> None:
    wanted = {p.name: p.command for which in "ab" for p in gpu_session.parts(which, setting(tmp_path, memory))}
    assert after(wanted["compare-6.7b"], "--layers") == layers and after(wanted["compare-gpt2-xl"], "--layers") == "12"
    assert after(wanted["compare-llama-8b"], "--layers") == llama and after(wanted["compare-xl-48"], "--layers") == "48"
    assert after(wanted["compare-xl-48"], "--sizes") == "gpt2-xl" and "--layers" not in wanted["compare-gpt2-124m"]
    for name in ("compare-6.7b", "compare-gpt2-xl", "compare-gpt2-124m"):
        peers = wanted[name][wanted[name].index("--peers") + 1 :]
        assert peers[:3] == ["ours-recorded", "torch-compile", "ours"], name
    cluster = "clusters/h200" if memory == H200 else "clusters/dgx-h100"
    assert cluster in wanted["calibrate"]


def test_every_size_peer_and_test_is_there(tmp_path: Path) -> None:
    for table in (gpu_session.SIZES, gpu_session.TINY_SIZES):
        for name, sized in (pair for group in table.values() for pair in group.items()):
            assert {"xl-48": "gpt2-xl"}.get(name, name) in sizes() and set(sized.peers) <= set(PEERS)
    root = Path(gpu_session.__file__).resolve().parent.parent
    for part in gpu_session.parts("a", setting(tmp_path)):
        assert all((root / word).exists() for word in part.command if word.endswith(".py")), part.command


def test_kernels_without_their_binding_are_refused(tmp_path: Path) -> None:
    (tmp_path / "libmp_cuda.so").touch()
    assert "has no libmp_binding.so" in gpu_session.install_kernels(tmp_path)


def test_failures_of_the_kernel_tests_are_named(tmp_path: Path) -> None:
    (tmp_path / "kernels.xml").write_text(JUNIT)
    found = data_of("kernels", tmp_path)
    assert found is not None and found["failed"] == {"tests.kernels.test_norm.test_rms_norm[gpu]": "error 3e-2"}
    assert headline("kernels", found).startswith("2 passed, 2 skipped; failed: tests.kernels.test_norm.test_rms_norm")
    (tmp_path / "kernels.xml").write_text(JUNIT[:40])  # cut off
    assert data_of("kernels", tmp_path) is None and headline("kernels", None) == "no result"


VERBOSE = """tests/kernels/test_norm.py::test_rms_norm[gpu-a b] PASSED                [ 20%]
tests/kernels/test_norm.py::test_layer_norm[gpu] FAILED                       [ 40%]
tests/kernels/test_norm.py::test_opcheck SKIPPED (no GPU that torch can use)  [ 60%]
tests/kernels/test_norm.py::test_cut_off[gpu]"""
WITH_WORKERS = """scheduling tests via LoadScheduling
tests/kernels/test_norm.py::test_rms_norm[gpu-a b]
[gw0] [  1%] PASSED tests/kernels/test_norm.py::test_rms_norm[gpu-a b]
tests/kernels/test_norm.py::test_cut_off[gpu]
[gw7] [100%] FAILED tests/kernels/test_norm.py::test_layer_norm[gpu]
[gw1] [ 20%] SKIPPED tests/kernels/test_norm.py::test_opcheck"""


@pytest.mark.parametrize("text", [VERBOSE, WITH_WORKERS], ids=["alone", "workers"])
def test_tests_that_are_stopped_keep_what_has_ended(tmp_path: Path, text: str) -> None:
    (tmp_path / "kernels.txt").write_text("collected 5 items\n" + text)
    assert headline("kernels", data_of("kernels", tmp_path)) == (
        "1 passed, 1 skipped; failed: tests/kernels/test_norm.py::test_layer_norm[gpu]; stopped before the end")
    (tmp_path / "kernels.txt").write_text("No module named pytest\n")
    assert data_of("kernels", tmp_path) is None


def test_a_part_knows_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(gpu_session.__file__).resolve().parent.parent)
    look = (f"import sys, time; sys.path.insert(0, {root!r}); from benchmarks.compare.child import ends_at; "
            "print(ends_at(0.0) - time.monotonic())")
    run(Part("first", [sys.executable, "-c", look], 60.0), tmp_path, 40.0)
    assert 20.0 < float((tmp_path / "first.txt").read_text()) < 40.0 - child.CLOSING_S
    monkeypatch.delenv("PART_ENDS", raising=False)
    assert child.ends_at(0.0) is None
    began = psutil.Process().create_time()
    for clock, ago in ((began + 30.0, 30.0), (began + 9e8, 0.0), (began - 5.0, 0.0)):  # two are wrong
        monkeypatch.setattr(child, "time", SimpleNamespace(time=lambda clock=clock: clock, monotonic=lambda: 1000.0))
        assert child.ends_at(100.0) == pytest.approx(1100.0 - ago)


def test_the_run_on_text_leaves_no_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*arguments: str, log: Path) -> str:
        if arguments[0] == "generate":
            raise SystemExit(3)
        (tmp_path / "train" / "runs" / "first").mkdir(parents=True, exist_ok=True)
        return ""

    monkeypatch.setattr(gpu_train, "command", command)
    with pytest.raises(SystemExit):
        gpu_train.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)])
    assert not (tmp_path / "train" / "runs").exists()


def test_doctors_answer_is_found_in_what_stands_around_it() -> None:
    assert gpu_env.first_object('warning\n{"findings": [{}]}\nbye {') == {"findings": [{}]}
    assert gpu_env.first_object("killed") is None and gpu_env.first_object("{broken") is None


def test_headlines_name_what_is_slower_launch_bound_or_changed() -> None:
    fast = {"own": 1.0, "eager": 2.0}
    op = {"name": "norm", "shape": "8x8", "forward_ms": fast, "both_ms": {"own": 3.0, "eager": 2.0},
          "forward_host_ms": {"own": 1.5, "eager": 0.1}, "both_host_ms": {"own": 0.1, "eager": 0.1},
          "forward_share": 0.5, "both_share": 0.8}
    says = headline("ops", {"hardware": {"copy_gb_s": 3000.0}, "ops": [op]})
    assert "50% to 80%" in says and "launch-bound 1 of 2" in says and "slower than eager: norm 8x8 both 1.50" in says
    now = {"sizes": [{"size": "x", "peers": [
        {"peer": "ours", "state": "counted", "seconds": {}, "mfu": 0.5},
        {"peer": "titan", "state": "unable", "reason": "not installed"}]}]}
    assert headline("compare-x", now) == "ours 50.0% MFU; titan [unable]"
    times = {"ours": {"seconds": [0.1]}, "ours-recorded": {"seconds": [0.08]}}
    equal = {"differences": [], "peers": times}
    assert headline("recorded", equal) == "equal bits; 100.00 ms call by call, 80.00 replayed (+25.0%)"
    assert headline("recorded", {"differences": ["losses: 1 of 6 differ"], "peers": {}}).startswith("losses: 1 of 6")
    case = {"saved_ms": 1.0, "expected_ms": 1.4, "passes": ["forward"], "go": True}
    assert headline("epilogues", {"decision": {"go": True, "cases": {"xl": case}}, "rows": []}) == (
        "go; xl: 1.00 of 1.40 ms a step")
    card = {"name": "NVIDIA H200", "power_limit_w": 700.0}
    assert headline("env", {"hardware": {"card": card}, "doctor": {"findings": []}}) == (
        "NVIDIA H200, 700 W; nothing wrong")
    assert headline("env", {"hardware": {"card": card}}) == "NVIDIA H200, 700 W; doctor did not answer"
    trained = {"first_loss": 5.5, "last_loss": 2.25, "steps": [1, 2], "resumed_at": 1, "tokens_per_second": 5e5}
    assert headline("train", trained) == "loss 5.50 to 2.25 in 2 steps, resumed at 1, 500,000 tokens/s"
    assert "cannot be read" in headline("profile", {"profiles": [{"kernels": [{}]}]})


def test_a_replay_that_differs_in_one_bit_is_named() -> None:
    row = {"losses": [5.0, 4.5], "grad_norms": [1.0, 1.25], "digest": [3, 4]}
    assert differences(row, dict(row)) == []
    off = {**row, "grad_norms": [1.0, 1.2500000000000002], "digest": [3, 5]}
    found = differences(row, off)
    assert [text.partition(":")[0] for text in found] == ["grad_norms", "digest"] and "the first at 1" in found[1]


@pytest.mark.parametrize("size", [1 << 10, 40 << 20])
def test_copies_of_inputs_exceed_the_cache(size: int) -> None:
    leaf = torch.zeros(size // 4, requires_grad=True)
    copies = copies_of((leaf, 3), CPU)
    total = len(copies) * size
    assert total >= CACHES * last_cache_bytes(CPU) or len(copies) == MOST_COPIES
    assert copies[0][0] is leaf and all(c[1] == 3 and c[0].requires_grad and c[0].is_leaf for c in copies)
    assert len({c[0].data_ptr() for c in copies}) == len(copies)


def test_calls_take_the_copies_in_turn() -> None:
    used: list[int] = []
    time_calls({"x": used.append}, CPU, copies=3, calls=6, repeats=2)
    assert used == [0, 1, 2] + [0, 1, 2, 0, 1, 2] * 2


def test_copies_are_independent_of_the_inputs() -> None:
    leaf = torch.ones(4)
    copies = copies_of((leaf,), CPU)
    leaf += 1
    assert len(copies) > 1 and torch.equal(copies[1][0], torch.ones(4))


@pytest.mark.parametrize("repeatable, code", [(True, 1), (False, 0)])
def test_a_library_that_repeats_nothing_is_no_fault_of_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeatable: bool, code: int
) -> None:
    started: list[str] = []

    class Worker:
        def __init__(self, device: str, threads: int) -> None:
            self.peer = ""

        def ask(self, do: str, *, timeout_s: float, **more: Any) -> dict[str, Any]:
            if do == "build":
                self.peer = more["peer"]
                started.append(self.peer)
            first = self.peer == "ours" and (repeatable or started.count("ours") == 1)
            norm = 1.0 if first else 1.1
            usual: dict[str, dict[str, Any]] = {
                "build": {}, "check": {"losses": [5.0], "grad_norms": [norm]}, "digest": {"digest": [1]},
                "time": {"seconds": 0.1, "cpu_seconds": 0.1, "memory": 5, "window": [0.0, 1.0]},
            }
            return usual[do]

        def close(self) -> None:
            """The process ends."""

    monkeypatch.setattr(recorded, "Child", Worker)
    monkeypatch.setattr(recorded, "hardware", lambda device, threads: {})
    monkeypatch.setattr(recorded, "clock_log", lambda device: ClockLog(None, "none"))
    out = tmp_path / "recorded.json"
    assert recorded.main(["--size", "tiny-bf16", "--repetitions", "2", "--out", str(out)]) == code
    made = json.loads(out.read_text())
    assert started == ["ours", "ours-recorded", "ours"] and len(made["differences"]) == 1
    assert bool(made["differences_call_by_call"]) is not repeatable
    assert all(len(row["seconds"]) == 2 and row["clocks"][0] == {"missing": "none"} for row in made["peers"].values())
    assert headline("recorded", made).startswith("grad_norms: 1 of 1 differ")
