"""A session on a GPU: what is kept of each part, what is said of it, and how calls are timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_session
import pytest
import torch
from gpu_summary import data_of, headline, summary_table
from part_runner import Part, run_all

from benchmarks.compare.run import PeerResult, Plan, judge, stored_reference
from benchmarks.compare.sizes import sizes
from benchmarks.device_clock import CACHES, MOST_COPIES, copies_of, last_cache_bytes, time_calls

CPU = torch.device("cpu")
JUNIT = """<testsuites><testsuite tests="5" failures="1" errors="0" skipped="2" time="3.5">
<testcase classname="tests.kernels.test_norm" name="test_rms_norm[gpu]"><failure message="error 3e-2"
>x</failure></testcase>
<testcase classname="tests.kernels.test_norm" name="test_layer_norm[gpu]"/></testsuite></testsuites>"""


def test_every_part_is_in_the_file_before_the_next_one_starts(tmp_path: Path) -> None:
    record = gpu_session.Record(tmp_path, "cpu", ["--minutes", "1"])
    look = f"import json; print(list(json.load(open({str(record.path)!r}))['parts']))"
    wanted = [Part("first", [sys.executable, "-c", "print('why'); raise SystemExit(7)"], 60.0),
              Part("second", ["sleep", "60"], 0.1), Part("third", [sys.executable, "-c", look], 60.0)]
    run_all(wanted, tmp_path, None, after=record.take)
    assert (tmp_path / "third.txt").read_text() == "['first', 'second']\n"
    made = json.loads(record.path.read_text())
    assert [row["exit"] for row in made["parts"].values()] == [7, 124, 0]
    assert "why" in made["parts"]["first"]["tail"]
    table = summary_table(made, {})
    assert "| first | failed (exit 7) |" in table and "not done after 0.1 s" in table


def test_parts_share_the_minutes_and_each_writes_where_its_result_is_looked_for(tmp_path: Path) -> None:
    for minutes in (5.0, 10.0):
        wanted = gpu_session.parts(tmp_path, "cuda", tiny=False, minutes=minutes)
        assert sum(p.least_s for p in wanted) <= 60 * minutes
        for part in wanted:
            files = [word for word in part.command if word.startswith(str(tmp_path)) and word.endswith(".json")]
            assert not files or files[0] == str(tmp_path / f"{part.name}.json"), part
    names = [p.name for p in wanted]
    assert names.index("kernels") < names.index("ops") < names.index("compare-gpt2-xl") < names.index("ops-compile")
    assert set(gpu_session.SIZES) | set(gpu_session.TINY_SIZES) <= set(sizes())


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


def test_headlines_name_what_is_slower_launch_bound_or_changed() -> None:
    fast = {"own": 1.0, "eager": 2.0}
    op = {"name": "norm", "shape": "8x8", "forward_ms": fast, "both_ms": {"own": 3.0, "eager": 2.0},
          "forward_host_ms": {"own": 1.5, "eager": 0.1}, "both_host_ms": {"own": 0.1, "eager": 0.1},
          "forward_share": 0.5, "both_share": 0.8}
    says = headline("ops", {"hardware": {"copy_gb_s": 3000.0}, "ops": [op]})
    assert "50% to 80%" in says and "launch-bound 1 of 2" in says and "slower than eager: norm 8x8 both 1.50" in says
    now, before = ({"sizes": [{"size": "x", "peers": [
        {"peer": "ours", "state": "counted", "seconds": {}, "mfu": mfu},
        {"peer": "titan", "state": "unable", "reason": "not installed"}]}]} for mfu in (0.5, 0.45))
    assert headline("compare-x", now, before) == "ours 50.0% MFU (was 45.0% MFU)"
    trained = {"first_loss": 5.5, "last_loss": 2.25, "steps": [1, 2], "resumed_at": 1, "tokens_per_second": 5e5}
    assert headline("train", trained) == "loss 5.50 to 2.25 in 2 steps, resumed at 1, 500,000 tokens/s"
    assert "cannot be read" in headline("profile", {"kernels": [{}]})


def test_a_stored_reference_judges_peers_of_the_same_size_only(tmp_path: Path) -> None:
    size = sizes()["tiny"]
    numbers = {"losses": [5.0, 4.9, 4.8], "grad_norms": [1.0, 1.1, 1.2]}
    m = size.model
    found = {"size": "tiny", "model": {"num_layers": m.num_layers, "seq_length": m.seq_length}, "dtype": "fp32",
             "micro_batch": size.micro_batch, "global_batch": size.global_batch,
             "peers": [{"peer": "torch", "state": "counted", **numbers}]}
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"sizes": [found]}))
    assert stored_reference(path, size) == numbers
    path.write_text(json.dumps({"sizes": [{**found, "micro_batch": 1}]}))
    assert stored_reference(path, size) == {}
    other = {**numbers, "losses": [5.1, 4.9, 4.8]}
    right, wrong = PeerResult("ours", numbers=numbers), PeerResult("ours", numbers=other)
    judge(size, [right, wrong], numbers)
    assert right.state == "counted" and wrong.state == "refused"
    judge(size, [alone := PeerResult("ours", numbers=numbers)])
    assert alone.state == "refused" and "nothing says" in alone.reason


def test_a_plan_whose_time_is_over_starts_nothing() -> None:
    assert Plan("cpu", 1, ends=0.0).over and not Plan("cpu", 1).over


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
