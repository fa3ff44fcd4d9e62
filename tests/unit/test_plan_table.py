"""Tables of measured rates: between shapes the ratio to the formula is taken; attention by provider and length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_port.config.loader import load
from megatron_port.config.schema import CalibrationConfig
from megatron_port.errors import ConfigError
from megatron_port.plan.case import case_of, machine_of, table_of
from megatron_port.plan.kernel_table import Entry, KernelTable, band, between, held_out_errors, read_table, to_csv
from megatron_port.plan.links import Links, span
from megatron_port.plan.rates import Rates
from megatron_port.plan.step import plan_step


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
    assert hidden.product(8192, 8192, 8192) == pytest.approx(rates.product(8192, 8192, 8192), rel=0.01)
