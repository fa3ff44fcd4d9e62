"""Tables of measured rates: between shapes the ratio to the formula is taken; attention by provider and length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import CalibrationConfig
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.tools.plan.case import (
    Entry,
    KernelTable,
    Machine,
    band,
    between,
    case_of,
    held_out_errors,
    machine_of,
    read_table,
    table_of,
    to_csv,
)
from megatron_port.tools.plan.engines import ENGINES
from megatron_port.tools.plan.layer import layer_cost, start_seconds
from megatron_port.tools.plan.rates import Cost, Links, Rates, span
from megatron_port.tools.plan.step import plan_step


def test_a_ratio_that_is_the_same_everywhere_is_found_everywhere() -> None:
    def formula(shape: tuple[float, ...]) -> float:
        return shape[0] / (shape[0] + 100)

    entries = [Entry("product", "", "bf16", (n, 64.0, 64.0), 0.8 * formula((n, 64.0, 64.0))) for n in (64, 256, 1024)]
    assert between(entries, (512.0, 64.0, 64.0), formula) == pytest.approx(0.8)
    assert held_out_errors(entries, formula) == pytest.approx([0.0] * 3, abs=1e-9)
    assert between(entries, (1e6, 64.0, 64.0), formula) is None  # nothing measured near it
    bent = [*entries, Entry("product", "", "bf16", (300.0, 64.0, 64.0), formula((300.0, 64.0, 64.0)))]
    assert band(held_out_errors(bent, formula)) > 0.05  # a shape that the others do not foretell


def test_attention_has_its_providers_rate_and_length() -> None:
    """The published curves of an H100 (arXiv 2407.08608): FA2 is not FA3, and short sequences are slow."""
    rates = Rates.of(machine_of(load("clusters/dgx-h100").config))
    two, three, cudnn = (rates.attention(p, 4096, 128) for p in ("flash2", "flash3", "cudnn"))
    assert two[0] == pytest.approx(319e12) and three[0] == pytest.approx(579e12) and cudnn[0] == pytest.approx(518e12)
    assert rates.attention("flash2", 512, 128)[0] < 0.65 * two[0]
    assert 298e12 < rates.attention("flash2", 3000, 128)[0] < 319e12
    assert rates.attention("flash2", 10**6, 128)[0] == pytest.approx(335e12)  # the longest that was measured
    slow, fast = (load("runs/frontier-22b", [f"backend.attention={name}"]).config for name in ("flash_attn", "fa3"))
    machine = machine_of(load("clusters/dgx-h100").config)
    steps = [plan_step(case_of(config)[0], machine).seconds for config in (slow, fast)]
    assert steps[1] < steps[0]


def test_products_of_a_table_take_as_long_as_they_were_measured(tmp_path: Path) -> None:
    machine = machine_of(load("clusters/dgx-h100").config)
    entries = [Entry("product", "", "bf16", (4096, 4096, 4096), 300.0)]
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(entries))
    tabled = replace(machine, calibration=CalibrationConfig(table=str(path)))
    seconds = Rates.of(tabled).product(4096, 4096, 4096)
    assert 2 * 4096**3 / seconds == pytest.approx(300e12, rel=1e-3)
    far = [Rates.of(m).product(65536, 65536, 65536) for m in (tabled, machine)]
    assert far[0] == pytest.approx(far[1])
    assert read_table(path).entries[0].shape == (4096.0, 4096.0, 4096.0)


def tabled(machine: Machine, entries: list[Entry], path: Path, **hardware: Any) -> Machine:
    path.write_text(to_csv(entries))
    calibration = replace(machine.calibration, table=str(path))
    return replace(machine, calibration=calibration, hardware=replace(machine.hardware, **hardware))


def test_passes_and_backward_products_have_rates_of_their_own(tmp_path: Path) -> None:
    machine = machine_of(load("clusters/frontier").config)
    plain = Rates.of(machine)
    rates = Rates.of(tabled(machine, [
        Entry("norm-forward", "", "bf16", (1e6,), 100.0), Entry("norm-forward", "", "bf16", (1e8,), 300.0),
        Entry("product", "", "bf16", (4096, 4096, 4096), 100.0),
        Entry("product-weight", "", "bf16", (4096, 4096, 4096), 50.0),
    ], tmp_path / "mine.csv"))
    assert rates.passes({"norm-forward": 1e7}, 0, "bf16") == pytest.approx(1e7 / 200e9)  # half way in the logarithm
    both = rates.passes({"norm-forward": 1e9, "rotate": 1e6}, 2, "bf16")
    assert both == pytest.approx(1e9 / 300e9 + plain.stream(1e6, 2))  # what was not measured goes at a copy's rate
    assert rates.passes({"norm-forward": 1e7}, 3, "fp32") == plain.stream(1e7, 3)  # measured in another dtype
    one, two, three = (
        rates.product(4096, 4096, 4096, op=op) for op in ("product", "product-input", "product-weight")
    )
    assert two == one and three == pytest.approx(2 * one, rel=1e-3)
    assert rates.adds_gradient(2) and not rates.adds_gradient(4) and not plain.adds_gradient(2)


def test_collectives_of_a_node_are_those_of_the_table(tmp_path: Path) -> None:
    machine = machine_of(load("clusters/frontier").config)
    plain = Links.of(machine)
    links = Links.of(tabled(machine, [
        Entry("all-reduce", "", "", (8, 1e6), 1.0), Entry("all-gather", "", "", (8, 1e6), 2.0),
        Entry("reduce-scatter", "", "", (8, 1e6), 4.0),
    ], tmp_path / "mine.csv"))
    node, far = span(machine, 8, 1), span(machine, 16, 8)
    assert links.collective(1e6, node) == pytest.approx(1e-3)
    assert links.collective(1e6, node, kind="half") == pytest.approx((0.5e-3 + 0.25e-3) / 2)
    half = links.collective(2e6, node, kind="reduce-scatter") / plain.collective(2e6, node, kind="half")
    assert half == pytest.approx(0.25e-3 / plain.collective(1e6, node, kind="half"))  # the ratio to the formula holds
    assert links.collective(1e6, far) == plain.collective(1e6, far)
    assert links.collective(1e9, node) == plain.collective(1e9, node)  # nothing was measured near it


def test_what_a_layer_waits_is_taken_where_it_was_measured(tmp_path: Path) -> None:
    machine = machine_of(load("clusters/frontier").config)
    case = replace(case_of(load("runs/frontier-22b").config)[0], tp=8, recompute="none")
    layer, size = model_spec(case.model).layers[0], case.model.seq_length * case.model.hidden_size * 2
    entries = [
        Entry(f"{kind}-{way}", "", case.dtype, (8, size), size / seconds / 1e9) for kind, way, seconds in (
            ("tensor", "forward", 1e-3), ("tensor", "backward", 2e-3), ("sequence", "forward", 3e-3),
            ("sequence", "backward", 4e-3),
        )
    ]
    measured = tabled(machine, entries, tmp_path / "mine.csv")
    for one, waits in (
        (case, (2e-3, 4e-3)), (replace(case, sequence_parallel=True), (6e-3, 8e-3)),
        (replace(case, recompute="full"), (2e-3, 4e-3 + 2e-3)),
    ):  # two regions, and what recompute runs again
        one = replace(one, micro_batch=1)
        cost = layer_cost(one, layer, Rates.of(measured), Links.of(measured), span(machine, 8, 1))
        assert (cost.forward_tensor, cost.backward_tensor) == pytest.approx(waits, rel=1e-3)
    pieces = [replace(case, tensor_chunks=2, micro_batch=1), replace(case, tp=16, micro_batch=1)]
    for one, group in zip(pieces, (span(machine, 8, 1), span(machine, 16, 1))):  # measured without pieces, on one node
        plain, same = (layer_cost(one, layer, Rates.of(m), Links.of(m), group) for m in (machine, measured))
        assert plain == same


def test_a_device_that_is_the_host_computes_nothing_while_it_starts_operations(tmp_path: Path) -> None:
    cost = Cost(forward=3.0, backward=5.0, forward_starts=1.0, backward_starts=7.0)
    assert cost.with_host().passes == (3.0, 7.0) and cost.with_host(is_device=True).passes == (4.0, 12.0)
    machine = machine_of(load("clusters/frontier").config)
    case = replace(case_of(load("runs/frontier-22b").config)[0], recompute="none")
    entries = [
        Entry("host", "", "", (1,), 1.0), Entry("host-micro-batch", "", "", (1,), 0.01),
        Entry("host-step", "", "", (1,), 0.001),
    ]
    ahead, host = (
        plan_step(case, tabled(machine, entries, tmp_path / "mine.csv", is_host=is_host)) for is_host in (False, True)
    )
    assert plan_step(case, machine).split.host == 0.0
    assert ahead.split.host == pytest.approx(1e-3)  # of the step, which begins when the last one's loss is known
    layers, at_ends = case.model.num_layers / case.pp, 100e-6 / 2  # a stage has one end at the most
    calls = start_seconds(case, model_spec(case.model).layers[0], replace(Rates.of(machine), host=1e-6))
    passes = case.micro_batches * (layers * sum(calls) + at_ends)
    assert host.split.host == pytest.approx(1e-3 + passes, rel=1e-6)


def test_what_products_do_not_hide_is_seen(tmp_path: Path) -> None:
    machine = machine_of(load("clusters/frontier").config)
    case = replace(case_of(load("runs/frontier-22b").config)[0], tp=8, recompute="none")
    sequence = replace(case, sequence_parallel=True)
    shown = replace(machine, calibration=replace(machine.calibration, overlap_share=0.0))
    native = replace(case, engine=ENGINES["native"])
    for one in (case, sequence, native, replace(native, zero_stage=3)):
        hidden, seen = (plan_step(one, m).split for m in (machine, shown))
        assert seen.tensor > hidden.tensor and seen.data >= hidden.data
    entries = [Entry(f"{kind}-hidden", "", "", (8, size), share) for size, share in ((1e6, 0.8), (1e8, 0.4))
               for kind in ("all-gather", "reduce-scatter")]
    by_size = Links.of(tabled(machine, entries, tmp_path / "mine.csv"))
    near, far = span(machine, 8, 1), span(machine, 16, 8)
    assert by_size.overlap_share("all-gather", 1e7, near) == pytest.approx(0.6)
    assert by_size.overlap_share("all-gather", 1e7, far) == by_size.overlap_share("all-reduce", 1e7, near) == 1.0
    layer = model_spec(case.model).layers[0]
    costs = [layer_cost(sequence, layer, Rates.of(m), Links.of(m), span(m, case.tp, 1)) for m in (machine, shown)]
    pair = costs[1].forward_tensor  # two pairs forward; backward also the gathering that is made again beside products
    assert costs[1].backward_tensor == pytest.approx(1.5 * pair) and costs[0].backward_tensor < pair


@pytest.mark.parametrize("text, word", [
    ("op,provider,dtype,shape\nproduct,,,4x4x4\n", "no column rate"),
    ("op,provider,dtype,shape,rate,source\nproduct,,bf16,4x4x4,-3,\n", "line 2"),
    ("op,provider,dtype,shape,rate,source\nproduct,,bf16,four,3,\n", "positive"),
])
def test_a_bad_table_is_refused_by_line(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        table_of(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        table_of(str(tmp_path / "none.csv"))


def test_a_table_is_equal_to_itself_alone() -> None:
    """It is part of the keys of caches."""
    one, two = KernelTable([]), KernelTable([])
    assert one == one and one != two and hash(one) != hash(two)


def test_all_reduces_within_a_node_take_as_long_as_they_were_measured() -> None:
    """nccl-tests on 8 A100 (VIA-Research/vTrain): sizes that the table does not have, and what it leaves alone."""
    machine = machine_of(load("clusters/a100-4hdr").config)
    links, bare = Links.of(machine), Links.of(replace(machine, calibration=CalibrationConfig()))
    for ranks, seconds in ((2, 607.8e-6), (4, 813.4e-6), (8, 913.0e-6)):
        group = span(machine, ranks, 1)
        assert links.collective(103_809_024, group) == pytest.approx(seconds, rel=0.05)
        assert links.collective(103_809_024, group) > 1.05 * bare.collective(103_809_024, group)
        half = links.collective(103_809_024, group, kind="half")  # a reduce-scatter is half of an all-reduce
        assert half == pytest.approx(links.collective(103_809_024, group) / 2)
    apart = span(machine, 64, 1)
    assert links.collective(1e9, apart) == bare.collective(1e9, apart)


def test_attention_that_writes_its_scores_takes_as_long_as_measured() -> None:
    """16 x 8 heads of size 64 at 2,048 positions on an A100 40 GB (arXiv 2205.14135, tables 13, 15 and 18): four
    products and Megatron's softmax backward 6.49 ms; dropout adds 2.24 ms to the forward pass."""
    machine = machine_of(load("clusters/selene").config)
    rates = Rates.of(replace(machine, hardware=replace(machine.hardware, memory_bandwidth_gb=1555.0)))
    scores = 16 * 8 * 2048**2
    written = rates.product(2048, 2048, 64, batch=128)
    read = rates.product(2048, 64, 2048, batch=128)
    assert written + 3 * read + rates.stream(6 * scores) == pytest.approx(6.49e-3, rel=0.12)
    assert rates.dropout(scores, 5) == pytest.approx(2.24e-3, rel=0.02)
    assert written > 2 * scores / rates.memory + 2 * 64 * scores / rates.matmul  # nothing hides a tile's writing
    hidden = replace(rates, epilogue_overlap=True)
    assert hidden.product(2048, 2048, 64, batch=128) < 0.9 * written
    large = rates.product(8192, 8192, 8192)  # the pipeline is filled once there, not for each tile
    assert 0.97 * large < hidden.product(8192, 8192, 8192) < large


def test_products_of_persistent_kernels_take_what_an_h200_measured() -> None:
    """Bursts: products of 4096 x 4096 at a growing inner size (gpu-session-nvidia-h200.json) are 9.4 us and 40 ns a
    step; a step of all multiprocessors at the rate of bursts, 864 TFLOP/s."""
    machine = machine_of(load("clusters/h200").config)
    burst = replace(machine, hardware=replace(machine.hardware, matmul_tflops=864.0), calibration=CalibrationConfig())
    rates = Rates.of(burst)
    for inner, tflops in ((256, 398.0), (512, 545.4), (1024, 668.6), (2048, 752.1), (4096, 789.2), (8192, 810.1)):
        planned = 2e-12 * 4096 * 4096 * inner / rates.product(4096, 4096, inner)
        assert planned == pytest.approx(tflops, rel=0.05), inner
