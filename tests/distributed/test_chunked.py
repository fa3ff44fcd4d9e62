"""Tensor-parallel products in chunks: the numbers of whole ones, and every read after the collective that it needs."""

from __future__ import annotations

import pytest
from cases import make_config, run_case
from pool import RankPool
from stream_order import OrderChecker, StreamRace
from test_zero3 import Case, case, differences

from megatron_port.core.config.checks import check
from megatron_port.core.dist.device_streams import observed_by
from megatron_port.core.errors import ConfigError
from megatron_port.ext.weights import chunked


def pair(dtype: str, chunks: int, *, sequence: bool) -> tuple[Case, Case]:
    plain, chunked = (
        case(0, (2, 1, 1), dtype=dtype, layers=2, sequence_parallel=sequence, tp_overlap_chunks=n) for n in (1, chunks)
    )
    return plain, chunked


def unequal(pairs: list[tuple[Case, Case]]) -> list[list[str]]:
    """What differs in each pair of runs of three steps, the second under the happens-before checker."""
    out = []
    for plain, parts in pairs:
        one = run_case(*plain, 3)
        with observed_by(OrderChecker()):
            out.append(differences(one, run_case(*parts, 3)))
    return out


def forgotten(parts: Case) -> str:
    """What the checker says when the last chunk's collective is not waited for."""
    with pytest.MonkeyPatch.context() as patch, observed_by(OrderChecker()):
        wait = chunked._wait
        patch.setattr(chunked, "_wait", lambda works: wait(works[:-1]))
        try:
            run_case(*parts, 1)
        except StreamRace as error:
            return str(error)
    return ""


def test_chunks_change_no_bit(ranks: RankPool) -> None:
    pairs = [
        pair("fp64", 4, sequence=False), pair("fp64", 2, sequence=True), pair("bf16", 4, sequence=True),
    ]
    for results in ranks.run(2, unequal, pairs, timeout=240.0):
        assert results == [[], [], []]


@pytest.mark.parametrize("sequence", [False, True])
def test_a_collective_that_is_not_waited_for_is_found(ranks: RankPool, sequence: bool) -> None:
    for said in ranks.run(2, forgotten, pair("fp32", 2, sequence=sequence)[1]):
        assert "the chunks' sums are used" in said


@pytest.mark.parametrize(("layout", "fp8", "words"), [
    ({"tp_overlap_chunks": 3}, "none", "tp_overlap_chunks 3 does not divide the 16 positions"),
    ({"tp_overlap_chunks": 16, "sequence_parallel": True, "tensor_parallel_size": 2}, "none", "the 8 positions"),
    ({"tp_overlap_chunks": 2}, "tensorwise", "scales of its own"),
])
def test_refusals(layout: dict[str, object], fp8: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(make_config(layout=layout, fp8=fp8, dtype="bf16"), world_size=2)
