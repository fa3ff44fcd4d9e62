"""One node's own check: vendors' tools, counting devices, the core's rate among other processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_port.core.config.schema import ClusterConfig, LaunchConfig, RunConfig
from megatron_port.tools.preflight.core import (
    Window,
    accounted_seconds,
    enough,
    parse_amd_ecc,
    parse_nvidia,
    parse_rocm,
    quota_cpus,
    quota_files,
    rate_of,
    stopped_seconds,
)
from megatron_port.tools.preflight.node import compare_environment, wanted_environment
from megatron_port.tools.preflight.probe import (
    ABSENT,
    HUNG,
    DeviceProbe,
    ask_vendor,
    counts,
    expected_devices,
    missing_devices,
    unmeasured,
)

NVIDIA = """\
0, NVIDIA H100 80GB HBM3, 550.54.15, 41, 1980, 1980, 81559, 0x0000000000000000, 0, 0, No, No
1, NVIDIA H100 80GB HBM3, 550.54.15, 88, 1200, 1980, 81559, 0x0000000000000048, 3, 17, Yes, No
2, NVIDIA A10, 550.54.15, 35, 1695, 1695, 23028, 0x0000000000000001, [N/A], [N/A], [N/A], [N/A]
"""


def rocm(cards: int) -> str:
    """rocm-smi's JSON, after the kind of warning it likes to print."""
    found: dict[str, dict[str, str]] = {
        f"card{i}": {
            "Device Name": "AMD INSTINCT MI250X", "Temperature (Sensor edge) (C)": "41.0",
            "Temperature (Sensor junction) (C)": f"5{i}.0", "Temperature (Sensor memory) (C)": "N/A",
            "sclk clock speed:": "(1700Mhz)", "mclk clock speed:": "(1600Mhz)",
        }
        for i in range(cards)
    }
    return "WARNING: AMD GPU device(s) is/are in a low-power state\n" + json.dumps(
        {**found, "system": {"Driver version": "6.7.0"}})


class Tools:
    """Answers to commands by their first word; all others are not installed."""

    def __init__(self, **answers: tuple[int, str]) -> None:
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        self.asked.append(" ".join(command))
        return self.answers.get(command[0], (ABSENT, ""))


def test_nvidia_smi() -> None:
    a, b, c = parse_nvidia(NVIDIA)
    assert (a.index, a.name, a.driver) == (0, "NVIDIA H100 80GB HBM3", "550.54.15")
    assert (a.temperature_c, a.max_clock_mhz) == (41, 1980)
    assert not a.throttling and a.ecc_uncorrected == 0 and not a.needs_reset
    assert b.throttling == ("hardware slowdown", "hardware thermal slowdown")
    assert (b.ecc_uncorrected, b.ecc_corrected, b.needs_reset) == (3, 17, "a row remap waits for a reset")
    assert not c.throttling and c.ecc_uncorrected is None  # idle is no fault
    assert parse_nvidia("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == []


def test_rocm_smi_and_amd_smi() -> None:
    devices = parse_rocm(rocm(8))
    assert [d.index for d in devices] == list(range(8)) and devices[3].temperature_c == 53.0
    assert devices[0].clock_mhz == 1700 and devices[0].driver == "6.7.0"
    assert parse_rocm("no devices") == [] and parse_rocm("[1]") == []
    rows = [{"gpu": 0, "ecc": {"total_correctable_count": 1, "total_uncorrectable_count": 0}},
            {"gpu": 1, "ecc": {"total_correctable_count": "N/A", "total_uncorrectable_count": 4}},
            {"gpu": 2, "ecc": "N/A"}]
    assert parse_amd_ecc(json.dumps(rows)) == parse_amd_ecc(json.dumps({"gpu_data": rows})) == {0: (0, 1), 1: (4, None)}


def test_an_nvidia_smi_that_knows_fewer_fields_is_asked_again() -> None:
    asked: list[str] = []

    def old(command: Sequence[str]) -> tuple[int, str]:
        asked.append(command[1])
        if "remapped_rows" in command[1]:
            return 2, 'Field "remapped_rows.pending" is not a valid field to query.'
        return 0, "\n".join(",".join(line.split(",")[:7]) for line in NVIDIA.splitlines())

    vendor = ask_vendor(DeviceProbe("cuda", 3, tool=old))
    assert len(asked) == 2 and len(vendor.devices) == 3 and not vendor.fault


def test_absent_tools_are_no_fault_and_failing_ones_are() -> None:
    assert ask_vendor(DeviceProbe(None, 0, tool=Tools())).fault == ""
    lost = "Unable to determine the device handle for GPU0000:41:00.0: GPU is lost."
    vendor = ask_vendor(DeviceProbe("cuda", 0, tool=Tools(nvidia_smi=(15, lost))))
    assert "GPU is lost" in vendor.fault and "exit 15" in vendor.fault
    assert counts(DeviceProbe("cuda", 0), vendor) == {"nvidia-smi": 0, "torch": 0}
    vendor = ask_vendor(DeviceProbe("rocm", 0, tool=Tools(rocm_smi=(HUNG, "rocm-smi did not answer within 30 s"))))
    assert vendor.tool == "rocm-smi" and "did not answer" in vendor.fault


@pytest.mark.parametrize(
    ("cards", "torch", "hidden", "slurm", "problem"),
    [
        (8, 8, False, 8, ""),
        (8, 1, True, 8, ""),  # --gpus-per-task=1
        (7, 7, False, 8, "7 of 8 devices answer (rocm-smi)"),
        (7, 1, True, 8, "7 of 8 devices answer (rocm-smi)"),
        (8, 6, False, 8, "torch can use 6 of the 8"),
        (None, 8, False, 8, ""),
        (None, 7, False, None, "7 of 8 devices answer (torch)"),
        (None, 1, True, 8, ""),
        (0, 0, False, None, "0 of 8 devices answer (rocm-smi)"),
    ],
)
def test_devices_are_counted_by_whoever_sees_the_whole_node(
    cards: int | None, torch: int, hidden: bool, slurm: int | None, problem: str
) -> None:
    environment = {"ROCR_VISIBLE_DEVICES": "0"} if hidden else {}
    if slurm is not None:
        environment["SLURM_GPUS_ON_NODE"] = str(slurm)
    tools = Tools() if cards is None else Tools(rocm_smi=(0, rocm(cards)))
    probe = DeviceProbe("rocm", torch, environment, tools, Path("/nowhere"))
    vendor = ask_vendor(probe)
    found = counts(probe, vendor)
    expected = expected_devices("auto", 8, probe, vendor, None)
    assert expected == 8
    problems = missing_devices(found, expected, environment)
    assert problem in " ".join(problems) and bool(problems) is bool(problem), (found, problems)


def test_a_machine_without_gpus_is_asked_for_none_unless_told_to() -> None:
    probe = DeviceProbe(None, 0, {}, Tools(), Path("/nowhere"))
    vendor = ask_vendor(probe)
    assert expected_devices("auto", 8, probe, vendor, None) is None
    assert expected_devices("cpu", 8, probe, vendor, None) is None
    assert expected_devices("rocm", 8, probe, vendor, None) == 8
    assert expected_devices("cpu", 8, probe, vendor, 4) == 4
    assert missing_devices({}, None, {}) == [] and missing_devices({}, 0, {}) == []
    assert missing_devices({}, 4, {}) == ["0 of 4 devices found"]


def test_device_files_and_slurms_count(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    probe = DeviceProbe("cuda", 2, {"SLURM_GPUS_ON_NODE": "gpu:h100:2"}, Tools(), tmp_path)
    found = counts(probe, ask_vendor(probe))
    assert found == {"/dev": 2, "SLURM": 2, "torch": 2}
    assert "1 of 4 devices" in unmeasured(found, 1, 4) and unmeasured(found, 4, 4) == ""


def test_settings_that_the_cluster_asks_for() -> None:
    config = RunConfig(
        cluster=ClusterConfig(environment=("NCCL_NET=OFI", "FI_MR_CACHE_MONITOR=kdreg2", "MIOPEN_PATH=/nvme/{user}")),
        launch=LaunchConfig(environment=("NCCL_NET=Socket", "A=b=c")),
    )
    wanted = wanted_environment(config)
    assert wanted == {"NCCL_NET": "Socket", "FI_MR_CACHE_MONITOR": "kdreg2", "MIOPEN_PATH": "/nvme/{user}", "A": "b=c"}
    found = compare_environment(wanted, {"NCCL_NET": "IB", "MIOPEN_PATH": "/nvme/root", "A": "b=c"})
    assert found == {"missing": {"FI_MR_CACHE_MONITOR": "kdreg2"}, "different": {"NCCL_NET": ["Socket", "IB"]}}


FLOP = 2.0 * 256**3


def window(share: float, idle: float, *, speed: float = 1.0, stopped: float = 0.0) -> Window:
    """Half a second at ``speed`` times 60 GFLOP per CPU second."""
    return Window(0.5, 0.5 * share, 0.5 * idle, 0.5 * stopped, int(0.5 * share * speed * 60e9 / FLOP))


def test_contention_is_not_held_against_a_core_and_a_quota_is() -> None:
    # Four checks on two CPUs, nothing idle; then a moment alone.
    clean = rate_of([window(0.5, 0.0), window(0.4, 0.05), window(0.97, 1.0)], FLOP, 2.0)
    assert clean.conclusive and clean.gflops == pytest.approx(58.2, rel=0.01) and clean.share == 0.97
    # A quota of a quarter, with and without company.
    held = rate_of([window(0.25, 0.0), *[window(0.25, 0.9)] * 3, window(0.26, 0.8)], FLOP, 2.0)
    assert held.conclusive and held.gflops == pytest.approx(15.6, rel=0.02)
    assert held.cpu_gflops == pytest.approx(60, rel=0.01)
    busy = rate_of([window(0.5, 0.0), window(0.4, 0.1)], FLOP, 12.0)
    assert not busy.conclusive and busy.gflops == pytest.approx(30, rel=0.01)
    slow = rate_of([window(0.5, 0.0, speed=0.5), window(1.0, 0.2, speed=0.5)], FLOP, 1.0)
    assert slow.cpu_gflops == pytest.approx(30, rel=0.01)
    # A quota shows among other processes too: time lost to those does not count.
    held = rate_of([window(0.2, 0.0, stopped=0.8), window(0.1, 0.0, stopped=0.1)], FLOP, 1.0)
    assert held.stopped == pytest.approx(0.75)
    assert rate_of([window(0.1, 0.0)], FLOP, 1.0).stopped == 0.0


def test_one_window_in_which_others_came_and_went_condemns_no_core() -> None:
    """A busy node: the process waited for its CPU while another idled for a moment, and was never free."""
    busy, moment = window(0.3, 0.0), window(0.55, 0.4)
    for windows in ([*[busy] * 5, moment], [busy, moment, busy, moment, moment]):
        found = rate_of(windows, FLOP, 12.0)
        assert not found.conclusive and found.cpu_gflops == pytest.approx(60, rel=0.01)
    assert rate_of([busy, moment, window(0.95, 0.5)], FLOP, 12.0).conclusive, "a rate that is good needs no second one"


def test_a_measurement_ends_when_it_is_sure() -> None:
    clear, low, busy = window(0.98, 0.9), window(0.25, 0.9), window(0.5, 0.0)
    assert not enough([clear]) and enough([clear, busy, clear])
    assert not enough([low] * 3) and enough([low] * 4)
    assert not enough([busy] * 20)


def test_quota_counters_of_both_versions_of_control_groups(tmp_path: Path) -> None:
    old, new = tmp_path / "cpu" / "job" / "step", tmp_path / "slice"
    texts = {old: "nr_throttled 3\nthrottled_time 2500000000\n", new: "usage_usec 9\nthrottled_usec 1500000\n"}
    for folder, text in texts.items():
        folder.mkdir(parents=True)
        (folder / "cpu.stat").write_text(text)
    (tmp_path / "cpu" / "cpu.stat").write_text("throttled_time 0\n")
    proc = tmp_path / "cgroup"
    proc.write_text("4:memory:/x\n1:cpu,cpuacct:/job/step\n0::/slice\n")
    found = quota_files(proc, tmp_path)
    assert found == [old / "cpu.stat", tmp_path / "cpu" / "cpu.stat", new / "cpu.stat"]
    assert stopped_seconds(found) == 2.5 and stopped_seconds(found[2:]) == 1.5
    assert quota_cpus(found) is None
    (new / "cpu.max").write_text("max 100000\n")
    assert quota_cpus(found) is None
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu.cfs_period_us").write_text("20000\n")
    assert quota_cpus(found) is None
    (old / "cpu.cfs_quota_us").write_text("4000\n")
    (new / "cpu.max").write_text("50000 100000\n")
    assert quota_cpus(found) == 0.2 and quota_cpus(found[2:]) == 0.5
    assert quota_files(tmp_path / "absent", tmp_path) == [] and stopped_seconds([tmp_path / "gone"]) == 0.0
    (tmp_path / "schedstat").write_text("2000000000 500000000 7\n")
    assert accounted_seconds(tmp_path / "schedstat") == 2.5 and accounted_seconds(tmp_path / "gone") is None
    (tmp_path / "schedstat").write_text("0 0 0\n")
    assert accounted_seconds(tmp_path / "schedstat") is None  # the kernel does not count
    proc.write_text("0::/../elsewhere\n")
    assert quota_files(proc, tmp_path) == []
