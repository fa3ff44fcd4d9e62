"""Which nodes are good: judged from made-up files, and through the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.cli.main import main
from megatron_port.core.config.schema import PreflightConfig
from megatron_port.core.errors import EnvironmentFault
from megatron_port.run.launchers import expand_hosts
from megatron_port.tools.preflight import node_file as files
from megatron_port.tools.preflight.verdict import common_versions, make_report, read_nodes, render, select, upper_median

LIMITS = PreflightConfig(share_of_median=0.8, free_memory_gb=50.0)
Node = dict[str, Any]


def healthy(name: str, *, noise: float = 0.0, gpus: int = 8) -> Node:
    """A Frontier node's file, every rate ``noise`` below par."""
    par = 1.0 - noise
    return {
        "format": 1, "node": name, "hostname": name, "attempt": "local", "time": "",
        "cpus": 56.0,
        "core": {"gflops": 60.0 * par, "cpu_gflops": 61.0 * par, "share": 0.99, "stopped": 0.0, "conclusive": True,
                 "windows": 2, "seconds": 1.1},
        "gpus": [{"index": i, "name": "MI250X", "memory_total": 64 * 10**9, "memory_free": int(63e9 * par),
                  "alone_tflops": 150.0, "tflops": 140.0 * par, "fault": ""} for i in range(gpus)],
        "device_counts": {"rocm-smi": gpus, "torch": gpus}, "expected_devices": gpus, "missing_devices": [],
        "unmeasured": "",
        "vendor": {"tool": "rocm-smi", "fault": "",
                   "devices": [{"index": i, "temperature_c": 60.0} for i in range(gpus)]},
        "memory": {"total": 512 * 10**9, "available": 500 * 10**9},
        "disk": {"path": "/mnt/bb", "total": 10**12, "free": 9 * 10**11},
        "shm": {"path": "/dev/shm", "total": 2**38, "free": 2**38},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "driver": "6.7.0", "megatron_port": "0.1.0"},
        "environment": {"missing": {}, "different": {}, "set": {}}, "seconds": 6.0,
    }


def _set(*path: Any) -> Callable[[Node], None]:
    *way, key, value = path

    def change(node: Node) -> None:
        for step in way:
            node = node[step]
        node[key] = value

    return change


def _core(**values: Any) -> Callable[[Node], None]:
    return lambda node: node["core"].update(values)


SICK: dict[str, tuple[Callable[[Node], None], str]] = {
    "slow core": (_core(gflops=40.0, cpu_gflops=40.0), "GFLOP/s"),
    "held-back core": (_core(gflops=15.0, share=0.25), "25% of the time"),
    "few CPUs": (_set("cpus", 0.2), "0.2 CPUs may be used, at least 44.8"),
    "quota": (_core(gflops=15.0, share=0.25, stopped=0.75, conclusive=False), "CPU quota"),
    "slow device": (_set("gpus", 3, "tflops", 90.0), "device 3: 90 TFLOP/s"),
    "memory held": (_set("gpus", 2, "memory_free", int(30e9)), "device 2: 30 GB of memory free"),
    "broken device": (_set("gpus", 7, "fault", "out of order"), "device 7: out of order"),
    "missing device": (_set("missing_devices", ["7 of 8 devices answer (rocm-smi)"]), "7 of 8 devices"),
    "silent driver": (_set("vendor", "fault", "rocm-smi did not answer"), "did not answer"),
    "ECC": (_set("vendor", "devices", 1, "ecc_uncorrected", 2), "2 uncorrected"),
    "hot": (_set("vendor", "devices", 1, "throttling", ["hardware thermal slowdown"]), "thermal"),
    "waits for a reset": (_set("vendor", "devices", 1, "needs_reset", "a row remap waits for a reset"), "row remap"),
    "full disk": (_set("disk", "free", 10**8), "0.1 GB free on /mnt/bb"),
    "lost memory": (_set("memory", "total", 256 * 10**9), "256 GB on the host"),
    "other torch": (_set("versions", "torch", "2.11.0"), "torch 2.11.0, most nodes have 2.13.0"),
}
HARMLESS: dict[str, Callable[[Node], None]] = {
    "busy": _core(gflops=15.0, share=0.25, conclusive=False, stopped=0.01),
    "other driver": _set("versions", "driver", "6.8.0"),
    "variable unset": _set("environment", "missing", {"NCCL_NET": "OFI"}),
    "small shm": _set("shm", "free", 1000),
    "corrected": _set("vendor", "devices", 1, "ecc_corrected", 9),
    "one device seen": _set("unmeasured", "1 of 8 devices were measured"),
}


@pytest.mark.parametrize("kind", SICK)
def test_each_sickness_is_found_and_told(kind: str) -> None:
    nodes = {f"n{i}": healthy(f"n{i}", noise=0.02 * i) for i in range(4)}
    change, words = SICK[kind]
    change(nodes["n2"])
    report = make_report(nodes, LIMITS)
    assert report.bad == ["n2"] and report.good == ["n0", "n1", "n3"]
    text = " ".join(str(r) for r in report.nodes[2].reasons)
    assert words in text, text
    assert words in render(report) and "1 bad: n2" in render(report)


@pytest.mark.parametrize("kind", HARMLESS)
def test_notes_take_no_node_out(kind: str) -> None:
    nodes = {f"n{i}": healthy(f"n{i}") for i in range(4)}
    HARMLESS[kind](nodes["n1"])
    report = make_report(nodes, LIMITS)
    assert report.good == list(nodes) and len(report.nodes[1].notes) == 1
    assert "note (n1)" in render(report)


KINDS = st.sampled_from(["", "", *SICK, *HARMLESS, "silent"])


@given(st.lists(st.tuples(st.floats(0, 0.15), KINDS), min_size=1, max_size=12))
@settings(max_examples=120, deadline=None)
def test_the_bad_are_found_and_the_good_never_blamed(rows: list[tuple[float, str]]) -> None:
    """Whatever is wrong with fewer than half of the nodes whose core could be measured."""
    sick = [i for i, (_, kind) in enumerate(rows) if kind in SICK or kind == "silent"]
    most = (len(rows) - sum(kind == "busy" for _, kind in rows) - 1) // 2
    rows = [(noise, "" if i in sick and sick.index(i) >= most else kind) for i, (noise, kind) in enumerate(rows)]
    nodes: dict[str, Any] = {}
    for i, (noise, kind) in enumerate(rows):
        node = healthy(f"n{i}", noise=noise)
        if kind in SICK:
            SICK[kind][0](node)
        elif kind in HARMLESS:
            HARMLESS[kind](node)
        nodes[f"n{i}"] = "did not answer: it wrote no file" if kind == "silent" else node
    expected = [f"n{i}" for i, (_, kind) in enumerate(rows) if kind in SICK or kind == "silent"]
    report = make_report(nodes, LIMITS)
    assert report.bad == expected, render(report)
    assert json.loads(json.dumps([n.as_json() for n in report.nodes]))[0]["good"] is (expected[:1] != ["n0"])


def test_thresholds_hold_where_all_nodes_are_alike() -> None:
    nodes = {f"n{i}": healthy(f"n{i}") for i in range(3)}
    assert make_report(nodes, PreflightConfig(matmul_tflops=130.0)).bad == []
    assert make_report(nodes, PreflightConfig(matmul_tflops=150.0)).bad == list(nodes)
    # On a CPU node the same threshold is one core's.
    bare = {f"n{i}": healthy(f"n{i}", gpus=0) for i in range(3)}
    assert make_report(bare, PreflightConfig(matmul_tflops=0.059)).bad == []
    assert make_report(bare, PreflightConfig(matmul_tflops=0.065)).bad == list(bare)


def test_a_version_without_a_majority_blames_nobody() -> None:
    assert common_versions([{"torch": "1"}, {"torch": "2"}]) == {}
    assert common_versions([{"torch": "1"}, {"torch": "2"}, {"torch": "2"}, {}]) == {}
    assert common_versions([{"torch": "2"}, {"torch": "2"}, {}]) == {"torch": "2"}
    assert upper_median([1.0, 2.0]) == 2.0 and upper_median([]) == 0.0


def test_selection_keeps_the_order_of_the_allocation_and_counts() -> None:
    nodes = {f"n{i}": healthy(f"n{i}") for i in (10, 9, 2, 1)}
    SICK["quota"][0](nodes["n9"])
    report = make_report(nodes, LIMITS)
    assert select(report, 3) == ["n10", "n2", "n1"]
    with pytest.raises(EnvironmentFault, match=r"3 of 4 nodes are good, the run needs 4.*--exclude=n9"):
        select(report, 4)


def test_silent_stale_and_torn_files_stand_for_bad_nodes(tmp_path: Path) -> None:
    for name, attempt in (("n1", "7.0"), ("n2", "6.0"), ("n4", "7.0")):
        files.write_json(tmp_path / f"node-{name}.json", {**healthy(name), "attempt": attempt})
    (tmp_path / "node-n4.json").write_text('{"format": 1, ')
    files.write_json(tmp_path / "node-n5.json", {"format": 1, "attempt": "7.0", "cpus": 1})
    assert "lacks core, gpus" in str(read_nodes(tmp_path, ["n5"], "7.0")["n5"])
    (tmp_path / "node-n5.json").unlink()
    found = read_nodes(tmp_path, ["n4", "n3", "n2", "n1"], "7.0")
    assert list(found) == ["n4", "n3", "n2", "n1"]
    assert "cannot be read" in str(found["n4"]) and "wrote no file" in str(found["n3"])
    assert "is of job 6.0" in str(found["n2"]) and not isinstance(found["n1"], str)
    report = make_report(found, LIMITS)
    assert report.good == ["n1"]
    # Without a list of nodes, files of other jobs are nobody's.
    assert list(read_nodes(tmp_path, [], "7.0")) == ["n1", "n4"]


def test_nodes_that_the_network_check_blamed_are_bad(tmp_path: Path) -> None:
    nodes = {f"n{i}": healthy(f"n{i}") for i in range(3)}
    report = make_report(nodes, LIMITS, {"bad": {"n1": "n1 is slow with every node"}})
    assert report.bad == ["n1"] and "slow with every node" in render(report)


def test_a_large_report_shows_every_bad_node_and_some_good_ones() -> None:
    nodes = {f"f{i:05d}": healthy(f"f{i:05d}") for i in range(100)}
    for i in (5, 6, 90):
        SICK["ECC"][0](nodes[f"f{i:05d}"])
    text = render(make_report(nodes, LIMITS))
    assert "97 good, 3 bad: f[00005-00006,00090]" in text and "81 more" in text and len(text.splitlines()) < 30


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Four nodes' files, of which n3 lacks a device; and a run file."""
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for i in range(1, 5):
        node = healthy(f"n{i}")
        if i == 3:
            SICK["missing device"][0](node)
        files.write_json(tmp_path / f"node-n{i}.json", node)
    run = tmp_path / "run.toml"
    run.write_text('name = "x"\n')
    return tmp_path, str(run)


def _report(folder: Path, run: str, *more: str) -> int:
    return main(["preflight", "report", run, "--out", str(folder), *more])


def test_report_writes_lists_and_exits_by_what_it_found(
    checked: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = checked
    assert _report(folder, run) == 3
    assert (folder / "good.txt").read_text() == "n[1-2,4]\n" and (folder / "bad.txt").read_text() == "n3\n"
    assert "7 of 8 devices answer" in capsys.readouterr().out
    found = json.loads((folder / "preflight.json").read_text())
    assert found["bad"] == ["n3"] and found["nodes"][2]["reasons"][0]["expected"] == 8

    assert _report(folder, run, "--nodes", "n[1-4]", "--select", "3") == 0
    assert expand_hosts((folder / "selected.txt").read_text().strip()) == ["n1", "n2", "n4"]
    assert _report(folder, run, "--nodes", "n[1-4]", "--select", "4") == 3
    assert "3 of 4 nodes are good" in capsys.readouterr().err

    assert _report(folder, run, "--nodes", "n[1-2,4]") == 0
    assert (folder / "bad.txt").read_text() == ""
    assert _report(folder, run, "--nodes", "n[1-2,4-5]") == 3
    assert (folder / "bad.txt").read_text() == "n5\n"


def test_report_takes_in_the_network_check_of_the_same_job_only(checked: tuple[Path, str]) -> None:
    folder, run = checked
    network = {"format": 1, "attempt": "local", "bad": {"n1": "slow"}, "faults": []}
    files.write_json(folder / "network.json", network)
    assert _report(folder, run, "--nodes", "n[1-4]", "--select", "2") == 0
    assert (folder / "selected.txt").read_text() == "n[2,4]\n"
    files.write_json(folder / "network.json", {**network, "attempt": "5.0"})
    assert _report(folder, run, "--nodes", "n[1-4]", "--select", "2") == 0
    assert (folder / "selected.txt").read_text() == "n[1-2]\n"
    # What is wrong with the job as a whole has no node to leave out.
    files.write_json(folder / "network.json", {**network, "bad": {}, "faults": ["runs on Socket"]})
    assert _report(folder, run, "--nodes", "n[1-2]") == 3


def test_report_without_any_file_says_what_to_run_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.toml"
    run.write_text("")
    assert _report(tmp_path / "nowhere", str(run)) == 2
    assert "run `preflight node` on each first" in capsys.readouterr().err
    assert _report(tmp_path, str(run), "--select", "0") == 2
