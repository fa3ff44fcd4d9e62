"""Tensor-parallel products that exchange rows pair by pair: the sums of a stated order, and the runs of collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import make_config, run_case
from pool import RankPool
from stream_order import OrderChecker, StreamRace
from test_chunked import unequal
from test_zero3 import Case, case

from megatron_port.core.config.checks import check, problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.dist.device_streams import in_flight, observed_by
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.ext.weights import exchanged
from megatron_port.ext.weights.exchanged import PairedMessages, exchange_of, symmetric_problem
from megatron_port.tools.parity.run_record import RankTrace

ROWS, BATCH, INPUTS, OUTPUTS = 6, 3, 32, 40


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's rows, matrix and bias, and all rows with its columns' part of the inputs."""
    drawn = torch.Generator().manual_seed(100 + dist.get_rank())
    ranks = dist.get_world_size()
    shapes = (ROWS, BATCH, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,), (ROWS * ranks, BATCH, INPUTS)
    made = (torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype) for shape in shapes)
    first, matrix, bias, whole = made
    return first, matrix, bias, whole


def in_rank_order(dtype: torch.dtype) -> list[bool]:
    """Whether both products have the bits of the same sums, made from gathered tensors without messages."""
    x, matrix, bias, whole = operands(dtype)
    group, ranks, me = dist.new_group(list(range(dist.get_world_size()))), dist.get_world_size(), dist.get_rank()
    rows = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(rows, x)
    gathered, out = PairedMessages().gather(x, matrix, bias, group)
    by_rank = torch.cat([torch.nn.functional.linear(part, matrix, bias) for part in rows])
    parts = torch.stack([torch.nn.functional.linear(part, matrix) for part in whole.chunk(ranks)])
    everyones = [torch.empty_like(parts) for _ in range(ranks)]
    dist.all_gather(everyones, parts)
    summed = torch.stack([theirs[me] for theirs in everyones]).sum(dim=0)
    return [torch.equal(gathered, torch.cat(rows)), torch.equal(out, by_rank),
            torch.equal(PairedMessages().scatter(whole, matrix, group), summed)]


def as_torchs(dtype: torch.dtype) -> list[float]:
    """Largest distances from what torch's own fallbacks of its fused operators return, over that of one rounding."""
    import torch.distributed._symmetric_memory as torchs

    x, matrix, _, whole = operands(dtype)
    group = dist.new_group(list(range(dist.get_world_size())))
    expected, (product,) = torchs._fused_all_gather_matmul_fallback(x, [matrix.t()], 0, group.group_name)
    added = torchs._fused_matmul_reduce_scatter_fallback(whole, matrix.t(), "sum", 0, group.group_name)
    gathered, out = PairedMessages().gather(x, matrix, None, group)
    mine = PairedMessages().scatter(whole, matrix, group)
    unit = torch.finfo(dtype).eps
    assert expected is not None
    return [float((a.double() - b.double()).abs().max() / (unit * b.double().abs().max()))
            for a, b in ((gathered, expected), (out, product), (mine, added))]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_have_the_bits_of_their_order(ranks: RankPool, world: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.backends.mkldnn.is_available():
        pytest.skip("products of bf16 are rounded otherwise without oneDNN")
    assert ranks.run(world, in_rank_order, dtype) == [[True, True, True]] * world


def test_torchs_operators_are_defined_as_these_products(ranks: RankPool) -> None:
    for apart in ranks.run(2, as_torchs, torch.float64):
        assert apart[0] == 0.0 and max(apart) < 8


def both(dtype: str, size: int, **layout: Any) -> tuple[Case, Case]:
    """A run with collectives and one with messages between pairs."""
    plain, pairs = (
        case(0, (size, 1, 1), dtype=dtype, layers=2, sequence_parallel=True, tp_exchange=name, **layout)
        for name in ("collective", "pairs")
    )
    return plain, pairs


def test_two_ranks_train_with_the_bits_of_collectives(ranks: RankPool) -> None:
    pairs = [both("fp64", 2), both("bf16", 2)]
    for results in ranks.run(2, unequal, pairs, timeout=240.0):
        assert results == [[], []]


def beyond_rounding(one: RankTrace, other: RankTrace) -> list[str]:
    """Return the tensors that differ by more than rounding in fp64: torch's fallbacks multiply transposed matrices,
    which some processors' products sum in another order."""
    mine, theirs = ([*trace.gradients[0], *trace.copies] for trace in (one, other))
    assert len(mine) == len(theirs) and one.losses == pytest.approx(other.losses, rel=1e-12)
    return [a[0] for a, b in zip(mine, theirs) if a[:3] != b[:3] or float((a[3] - b[3]).abs().max()) > 1e-12 * (
        1e-3 + float(b[3].abs().max()))]


def through_torchs_operators(plain: Case, pairs: Case) -> tuple[list[str], dict[str, int]]:
    """What differs where the rows go through torch's operators, with torch's fallbacks as their kernels for CPUs; and
    how often each was called in three steps."""
    import torch.distributed._symmetric_memory as torchs

    calls = {"gather": 0, "scatter": 0}

    def gather(*arguments: Any, **options: Any) -> Any:
        calls["gather"] += 1
        return torchs._fused_all_gather_matmul_fallback(*arguments, **options)

    def scatter(*arguments: Any) -> Any:
        calls["scatter"] += 1
        return torchs._fused_matmul_reduce_scatter_fallback(*arguments)

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", gather, "CPU")
    library.impl("fused_matmul_reduce_scatter", scatter, "CPU")
    try:
        one = run_case(*plain, 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchanged, "exchange_of", lambda *_: exchanged.SymmetricMemory())
            return beyond_rounding(one, run_case(*pairs, 3)), calls
    finally:
        library._destroy()


def test_torchs_operators_are_given_the_right_operands(ranks: RankPool) -> None:
    for different, calls in ranks.run(2, through_torchs_operators, *both("fp64", 2), timeout=240.0):
        # Two layers of two regions: an entry and an exit forward, an exit's gradient backward. Three steps of two
        # micro-batches, and four forward passes of the evaluation.
        assert calls == {"scatter": 4 * (6 + 4), "gather": 4 * (6 + 4) + 4 * 6}
        assert different == []


def losses(of: Case) -> list[float]:
    """Losses of three steps."""
    return [float(loss) for loss in run_case(*of, 3).losses]


def test_four_ranks_train_as_with_collectives(ranks: RankPool) -> None:
    plain, pairs = both("fp64", 4)
    expected, found = ranks.run(4, losses, plain), ranks.run(4, losses, pairs)
    assert max(abs(a / b - 1) for a, b in zip(found[0], expected[0])) < 1e-12
    assert all(one == found[0] for one in found)


def forgotten(of: Case) -> str:
    """What the checker says when no stream waits for a message (the program does, so that no rank loses another)."""
    with pytest.MonkeyPatch.context() as patch, observed_by(OrderChecker()):
        observed = in_flight
        patch.setattr(exchanged, "in_flight", lambda work, *a, **k: (observed(work, *a, **k), work)[1])
        try:
            run_case(*of, 1)
        except StreamRace as error:
            return str(error)
    return ""


def test_a_message_that_is_not_waited_for_is_found(ranks: RankPool) -> None:
    for said in ranks.run(2, forgotten, both("fp32", 2)[1]):
        assert "the product of a rank's rows" in said or "added" in said


@pytest.mark.parametrize(("layout", "changes", "words"), [
    ({"sequence_parallel": False}, {}, "needs layout.sequence_parallel"),
    ({"tp_overlap_chunks": 2}, {}, "the rows of each rank are the parts already"),
    ({}, {"fp8": "tensorwise", "dtype": "bf16"}, "scales of their own"),
    ({}, {"dtype": "fp32"}, "as nobody proved for others"),
    ({}, {"dtype": "bf16", "device": "rocm"}, "need NVIDIA GPUs and NVLink"),
    ({}, {"dtype": "bf16", "device": "cpu"}, "need NVIDIA GPUs and NVLink"),
])
def test_refusals(layout: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    device = changes.pop("device", "cuda")
    config = make_config(layout={"sequence_parallel": True, "tensor_parallel_size": 2, "tp_exchange": "symm_mem",
                                 **layout}, **changes)
    with pytest.raises(ConfigError, match=words):
        check(with_values(config, {"backend.device": device}), world_size=2)


def test_symmetric_memory_is_refused_by_name_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(layout={"sequence_parallel": True, "tensor_parallel_size": 2, "tp_exchange": "pairs"},
                         dtype="fp32")
    assert problems(with_values(config, {"data.synthetic": True}), world_size=2) == []
    with pytest.raises(EnvironmentFault, match='cannot serve: it needs an NVIDIA GPU, .* on cpu; set .*pair'):
        exchange_of("symm_mem", torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "for ROCm" in symmetric_problem(torch.device("cuda", 0))


def test_gpus_without_a_link_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        matrix = ((0, 4, 0), (4, 0, 4), (0, 4, 0))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch._C._distributed_c10d, "_detect_dma_connectivity", lambda *_: Found(), raising=False)
    assert exchanged._unlinked() == "no NVLink joins GPU 0 and GPU 2"
