"""`bench`: factors and descriptions from measurements whose truth is known; what the studies run; refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_port.cli.main import main
from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import CalibrationConfig, HardwareConfig, RunConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.layers.providers import torch_providers
from megatron_port.run.device import choose_device
from megatron_port.tools.bench import calibration
from megatron_port.tools.bench import measure as clock
from megatron_port.tools.bench.calibration import (
    Measured,
    ProductTime,
    calibrated,
    described,
    held_out_band,
    held_out_passes,
    host_entries,
    kernel_entries,
    measure,
    planned_product,
    ring_fit,
    shapes_of,
    table,
    to_toml,
)
from megatron_port.tools.bench.measure import CollectiveTime, overlap_share, pass_entries
from megatron_port.tools.bench.sweep import NAMES, _legal, _settings, _studies
from megatron_port.tools.plan.case import Machine, machine_of, to_csv
from megatron_port.tools.plan.rates import Links, Rates, span
from megatron_port.tools.tune.strategies import make_space


def truth(machine: Machine, *, ranks: int, dtypes: tuple[str, ...], kind: str = "cuda") -> Measured:
    """What a machine that is just as described would show."""
    rates, links = Rates.of(machine), Links.of(machine)
    found = Measured(
        host="n1", device="a device", kind=kind, ranks=ranks, torch="2", launch_s=rates.launch, stream=rates.memory,
        memory_bytes=64_000_000_000, reserved_bytes=500_000_000, jitter=0.004,
    )
    for dtype in dtypes:
        for shape in shapes_of(kind, None, ()):
            blank = ProductTime(*shape, dtype, 1.0)
            found.products.append(replace(blank, seconds=planned_product(machine, blank)))
    group = span(machine, ranks, 1)
    for size in (1 << 12, 1 << 20, 1 << 26):
        for kind_, name in (("all-reduce", "all-reduce"), ("half", "all-gather"), ("half", "reduce-scatter")):
            found.collectives.append(CollectiveTime(name, size, links.collective(size, group, kind=kind_)))
    return found


def test_three_factors_are_found_again() -> None:
    plain = replace(machine_of(load("clusters/frontier").config), calibration=CalibrationConfig())
    real = replace(plain, calibration=CalibrationConfig(matmul_scale=0.8, memory_scale=0.9, network_scale=0.6))
    fit = calibrated(plain.cluster, plain.hardware, truth(real, ranks=8, dtypes=("bf16",)), source="here")
    found = fit.machine.calibration
    assert not fit.fresh and found.source == "here"
    assert found.matmul_scale == pytest.approx(0.8, rel=0.02)  # launches are not scaled
    assert found.memory_scale == pytest.approx(0.9, rel=1e-3)
    assert found.network_scale == pytest.approx(0.6, rel=0.02)  # hops are not scaled
    assert fit.product_error < 0.02


def test_a_machine_without_a_description_gets_one(tmp_path: Path) -> None:
    cluster = load("clusters/cpu").config.cluster
    hardware = HardwareConfig(
        device="cores", matmul_tflops=0.02, fp32_matmul_tflops=0.06, compute_units=1, tile_rows=64, tile_columns=64,
        inner_fill=32, launch_us=6.0, memory_bandwidth_gb=9.0, memory_efficiency=1.0, node_gb=2.0, node_efficiency=1.0,
        node_latency_us=80.0, jitter=0.01,
    )
    real = Machine(cluster=replace(cluster, peak_tflops=1, memory_gb=8), hardware=hardware)
    fit = described(cluster, truth(real, ranks=4, dtypes=("fp32", "bf16"), kind="cpu"), source="here")
    found = fit.machine.hardware
    assert fit.fresh and found.inner_fill == 32 and fit.product_error < 0.05
    assert found.fp32_matmul_tflops == pytest.approx(0.06, rel=0.1) and found.memory_bandwidth_gb == 9.0
    assert found.node_gb == pytest.approx(2.0, rel=0.02) and found.node_latency_us == pytest.approx(80, rel=0.05)
    assert found.launch_us == 6.0 and fit.machine.cluster.gpus_per_node == 4
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(fit, truth(real, ranks=4, dtypes=("fp32",), kind="cpu"), extends="clusters/cpu"))
    again = machine_of(load(str(path)).config)  # it can be planned for
    assert again.hardware == found and again.cluster.memory_gb == 64.0
    run = tmp_path / "run.toml"
    run.write_text(f'extends = ["models/gpt-tiny", "{path}"]\n[batch]\nglobal_batch_size = 8\n')
    assert main(["plan", str(run), "--set", "layout.data_parallel_size=4", "--set", "precision.dtype=fp32"]) == 0


def test_a_calibration_is_a_file_that_extends_its_cluster(tmp_path: Path) -> None:
    machine = replace(machine_of(load("clusters/h200").config), calibration=CalibrationConfig())
    found = truth(machine, ranks=8, dtypes=("bf16",))
    fit = calibrated(machine.cluster, machine.hardware, found, source="bench calibrate on n1")
    path = tmp_path / "h200.toml"
    path.write_text(to_toml(fit, found, extends="clusters/h200"))
    loaded = load(str(path)).config
    shipped = load("clusters/h200").config.calibration.table  # extended, and so it stays
    assert loaded.calibration == replace(fit.machine.calibration, table=shipped) and loaded.hardware == machine.hardware
    assert any("all-gather" in line for line in table(fit, found))


def test_ring_fit_of_exact_times() -> None:
    ranks, bandwidth, hop = 4, 1e9, 5e-5
    times = [
        CollectiveTime("all-reduce", size, 1.5 * size / bandwidth + 6 * hop) for size in (1 << 12, 1 << 16, 1 << 24)
    ]
    assert ring_fit(times, ranks) == (pytest.approx(bandwidth), pytest.approx(hop))


def test_fp32_has_a_rate_of_its_own() -> None:
    plain = replace(machine_of(load("clusters/selene").config), calibration=CalibrationConfig())
    named = replace(plain, hardware=replace(plain.hardware, fp32_matmul_tflops=100.0))
    shape = (8192, 8192, 8192)
    slow, fast = (Rates.of(m).product(*shape, width=4) for m in (plain, named))
    assert slow / fast == pytest.approx(100.0 / (plain.hardware.matmul_tflops / 4), rel=0.01)
    assert Rates.of(named).product(*shape, width=8) == pytest.approx(2 * fast, rel=0.01)


def test_a_real_measurement_of_one_rank() -> None:
    found = measure(device=torch.device("cpu"), kind="cpu", name="cpu", ranks=1, memory_bytes=10**10,
                    shapes=[(64, 64, 64), (64, 64, 256)], dtypes=("fp32",), budget_s=0.005)
    assert [p.inner for p in found.products] == [64, 256] and all(p.tflops > 1e-5 for p in found.products)
    assert found.stream > 1e8 and 0 < found.launch_s < 0.01 and not found.collectives
    assert found.memory_bytes == 10**10 and found.reserved_bytes > 10**7
    fit = described(load("clusters/cpu").config.cluster, found, source="here")
    assert fit.machine.cluster.gpus_per_node == 1 and fit.machine.hardware.device == "cpu"


def test_shapes_are_the_models_layers() -> None:
    model = load("models/gpt-22b").config.model
    shapes = shapes_of("cuda", model, (1, 8))
    assert (2048, 3 * 6144 // 8, 6144) in shapes and (2048, 6144, 4 * 6144) in shapes
    assert len(set(shapes)) == len(shapes)
    assert max(a * b * c for a, b, c in shapes_of("cpu", model, (1, 8))) <= 2**28


def test_the_points_of_a_sweep_are_runs_that_train() -> None:
    config = with_values(load("runs/frontier-22b").config, {"activations.policy": "none"})
    space = make_space(config)
    found = _studies(space, NAMES, 16)
    assert {s.name for s in found} >= {"micro-batches", "stages", "strong", "attention", "attention-math"}
    for study in found:
        for point in study.points:
            assert _legal(space.config, point)
            changed = with_values(space.config, _settings(space.config, point))
            assert changed.model.seq_length == point.case.model.seq_length
            assert (changed.backend.attention == "math") is (study.name == "attention-math")
            assert changed.batch.global_batch_size == point.case.global_batch
            assert problems(changed, world_size=point.case.world) == []


def test_the_command_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    out = str(tmp_path / "x.toml")
    for arguments, words in (
        (["calibrate", "clusters/cpu", "-o", out, "--seconds", "0"], "--seconds 0"),
        (["calibrate", "clusters/nowhere", "-o", out], "was not found"),
        (["calibrate", "clusters/frontier", "-o", out, "--set", "cluster.memory_gb=0", "--set", "backend.device=cpu"],
         "cluster.memory_gb is 0"),
        (["sweep", "runs/frontier-22b", "--study", "nothing"], "--study nothing is unknown"),
        (["sweep", "runs/frontier-22b", "--steps", "2"], "leaves nothing"),
        (["sweep", "runs/frontier-22b"], "no SLURM allocation"),
    ):
        assert main(["bench", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x.toml").exists()


def test_a_table_of_measurements_is_planned_with(tmp_path: Path) -> None:
    """One shape is far slower than the formula: planned as measured, and the band of held-out shapes shows it."""
    machine = machine_of(load("clusters/frontier").config)
    found = truth(machine, ranks=8, dtypes=("bf16",))
    fit = calibrated(machine.cluster, machine.hardware, found, source="here")
    smooth = held_out_band(fit.machine, found)
    slow = found.products[-1]
    found.products[-1] = replace(slow, seconds=4 * slow.seconds)
    assert held_out_band(fit.machine, found) >= smooth and smooth < 0.05
    entries, path = tmp_path / "mine.csv", tmp_path / "mine.toml"
    entries.write_text(to_csv(kernel_entries(found, source="here")))
    path.write_text(to_toml(fit, found, extends="clusters/frontier", table_name=str(entries)))
    loaded = machine_of(load(str(path)).config)
    planned = Rates.of(loaded).product(slow.rows, slow.columns, slow.inner)
    assert planned == pytest.approx(4 * slow.seconds, rel=0.01)


def test_the_programs_own_passes_and_its_host_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_port.tools.bench.measure.SIZES", {"cpu": (1 << 12, 1 << 16)})
    monkeypatch.setattr("megatron_port.tools.bench.measure.COLD", {"cpu": 1 << 18})
    monkeypatch.setattr("megatron_port.tools.bench.calibration.WIDE", 64)
    monkeypatch.setattr("megatron_port.tools.bench.calibration.WIDEST", 128)
    config = load("models/gpt-tiny", ["backend.device=cpu"]).config
    device = choose_device("cpu", local_rank=0, local_world_size=1)
    entries = pass_entries(config.model, torch_providers(), "fp32", device.torch_device, 1, 0.0)
    ops = {e.op for e in entries}
    names = ("norm", "add", "activation", "loss", "attention")
    assert ops == {f"{op}-{way}" for op in names for way in ("forward", "backward")}
    machine = Machine(cluster=config.cluster, hardware=HardwareConfig(matmul_tflops=1, memory_bandwidth_gb=10))
    host = {e.op: e for e in host_entries(config, device, machine, "fp32", 1, 0.0)}
    assert set(host) == {"host", "host-recompute", "host-micro-batch", "host-step", "update"}
    assert all(math.isfinite(e.rate) and e.rate > 0 for e in host.values())
    found = truth(machine_of(load("clusters/frontier").config), ranks=2, dtypes=("fp32",), kind="cpu")
    found.entries = [*entries, *host.values()]
    fit = described(load("clusters/cpu").config.cluster, found, source="here")
    assert fit.machine.hardware.is_host and fit.machine.hardware.launch_us == 0.0  # starts are the host's
    assert held_out_passes(found) > 0 and any("activation-backward" in line for line in table(fit, found))


def test_the_hosts_times_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with times that are known: those of a real one are noise where others use its cores too."""
    layer, repeated, micro_batch, step, per_layer = 3e-3, 1e-3, 5e-4, 2e-3, 4e-4

    def known(config: RunConfig, device: DeviceInfo, budget_s: float) -> calibration.StepTime:
        layers, again = config.model.num_layers, config.activations.policy == "full"
        return calibration.StepTime(step, micro_batch + layers * (layer + per_layer + again * (repeated + per_layer)))

    monkeypatch.setattr(calibration, "step_time", known)
    monkeypatch.setattr(calibration, "_products", lambda *_: [per_layer, 0.0])
    config = load("models/gpt-tiny", ["backend.device=cpu"]).config
    machine = Machine(cluster=config.cluster, hardware=HardwareConfig(matmul_tflops=1, memory_bandwidth_gb=10))
    device = choose_device("cpu", local_rank=0, local_world_size=1)
    host = {e.op: 1e-6 / e.rate for e in calibration.host_entries(config, device, machine, "fp32", 1, 0.0)}
    assert host["host-recompute"] == pytest.approx(repeated) and host["host-micro-batch"] == pytest.approx(micro_batch)
    assert host["host-step"] == pytest.approx(step, rel=1e-3)
    calls = layer / host["host"]  # operations with autograd in a layer
    assert calls == pytest.approx(round(calls)) and 10 <= calls < 1000


def test_what_products_hide_of_collectives() -> None:
    def time(hidden: float) -> CollectiveTime:
        return CollectiveTime("all-reduce", 1 << 20, 4e-3, hidden, 2e-3)

    assert overlap_share([time(1e-3), time(2e-3)]) == pytest.approx(0.75)  # a product hides no more than it lasts
    assert overlap_share([time(-1e-3)]) == 0.0 and overlap_share([time(3e-3)]) == 1.0
    assert overlap_share([]) == 1.0  # one rank


def test_products_are_measured_under_the_load_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose clock falls as a power limit lets it: the mean of the last 0.1 s is to be 700 W, products take 900
    W and a copy 500. In bursts they have the whole clock; 0.7 of the time for both together they have 700 / 780."""
    now, drawn = 0.0, list[tuple[float, float]]()

    def work(seconds: float, power: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            window = drawn[-400:]
            mean = sum(t * w for t, w in window) / max(sum(t for t, _ in window), 0.1)
            slow = max(1.0, mean / 700.0) if power > 700 else 1.0
            now += seconds * slow
            drawn.append((seconds * slow, power))
        return run

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = now

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    def burst(call: Callable[[], None], device: torch.device) -> float:
        drawn.clear()
        before = now
        call()
        drawn.clear()
        return now - before

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clock, "device_seconds", burst)
    monkeypatch.setattr(clock, "LOAD_S", 0.0)
    monkeypatch.setattr(clock, "AHEAD", 20)
    share = clock.load_share(work(1.4e-3, 900.0), work(1.3e-4, 500.0), torch.device("cuda"))
    assert 700 / 800 < share < 700 / 760
    assert clock.load_share(work(1.4e-3, 600.0), work(1.3e-4, 500.0), torch.device("cuda")) == pytest.approx(1.0)
    assert clock.load_share(work(1.0, 900.0), work(1.0, 500.0), torch.device("cpu")) == 1.0
