"""Megatron-core and DeepSpeed against themselves on one process: healthy layouts are equal, and planted copies of known
bugs, or those that the installed version has, are found and named. More layouts: benchmarks/foreign.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_port.tools.foreign.ranks import Ranks
from megatron_port.tools.foreign.session import Session

BUGS = Path(__file__).resolve().parents[1] / "foreign_adapters" / "megatron_bugs.py"
needs_megatron = pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


@needs_megatron
@pytest.mark.parametrize(("size", "options"), [
    (2, {"pp": 2, "tied": True, "distributed_optimizer": True}),
    (4, {"tp": 2, "sp": True, "experts": 4, "ep": 2, "balance": "seq_aux_loss", "per_token": False}),
    (2, {"cp": 2, "groups": 2, "recompute": True}),
])
def test_megatron_core_is_itself_on_one_process(ranks: Ranks, size: int, options: dict[str, Any]) -> None:
    verdict = Session("megatron-core", ranks).compare(options, size)
    assert verdict.equal, "\n".join(verdict.lines())
    assert verdict.compared["gradients"] == verdict.compared["updates"] > 10
    assert verdict.worst < 1e-12


@needs_megatron
@pytest.mark.parametrize(("size", "options", "words"), [
    (2, {"tp": 2, "sinks": True}, "softmax_offset the first rank's part alone is counted"),
    (2, {"bug": "11 norm of heads", "tp": 2, "qk_norm": True}, "is not summed over tp"),
    (2, {"bug": "positions", "cp": 2, "rope": False}, "embedding.position_embeddings"),
], ids=["sinks", "norm of heads", "positions"])
def test_megatron_cores_bugs_are_named(ranks: Ranks, size: int, options: dict[str, Any], words: str) -> None:
    verdict = Session(str(BUGS), ranks).compare(options, size)
    said = "\n".join(verdict.lines())
    assert not verdict.equal and words in said, said


@needs_deepspeed
@pytest.mark.parametrize("options", [
    {"stage": 2, "micro_batches": 2, "clip": 0.5}, {"stage": 3, "persistent": 0}, {"stage": 1, "round_robin": True},
])
def test_deepspeed_is_itself_without_zero(ranks: Ranks, options: dict[str, Any]) -> None:
    verdict = Session("deepspeed-zero", ranks).compare(options, 2)
    assert verdict.equal, "\n".join(verdict.lines())
    assert verdict.compared["updates"] == 37
