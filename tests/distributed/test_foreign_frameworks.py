"""Megatron-core, DeepSpeed, torchtitan and nanotron against themselves on one process: healthy layouts are equal, and
planted copies of known bugs, or those that the installed version has, are found and named. More:
benchmarks/foreign.py."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_port.core.errors import ConfigError
from megatron_port.tools.foreign.ranks import Ranks, find_adapter
from megatron_port.tools.foreign.session import Session

BUGS = Path(__file__).resolve().parents[1] / "foreign_adapters" / "megatron_bugs.py"
MISTAKES = BUGS.parent / "titan_mistakes.py"
needs_megatron = pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")
needs_nanotron = pytest.mark.skipif(not importlib.util.find_spec("nanotron"), reason="nanotron is not installed")
needs_titan = pytest.mark.skipif(not importlib.util.find_spec("torchtitan"), reason="torchtitan is not installed")


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
    (2, {"cp": 2, "per_token": False}, "each cp rank divides by its own number of labels, 2 samples at a time"),
], ids=["sinks", "norm of heads", "positions", "labels of cp"])
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


def check_equal(adapter: str, ranks: Ranks, size: int, options: dict[str, Any], *, least: int) -> None:
    """Compare a framework on ``size`` ranks with itself on one process, by ``least`` parameters or more."""
    verdict = Session(adapter, ranks).compare(options, size)
    assert verdict.equal and not verdict.notes, "\n".join(verdict.lines())
    assert verdict.compared["gradients"] == verdict.compared["updates"] >= least
    assert verdict.worst < (1e-12 if options.get("fp64", True) else 1e-5)


@needs_titan
@pytest.mark.parametrize(("size", "options"), [
    (4, {"replicas": 2, "tp": 2, "sp": True, "chunks": 2, "accumulate": 2}),
    (4, {"pp": 2, "tp": 2, "backend": "full_dtensor", "schedule": "Interleaved1F1B"}),
    (2, {"fp64": False, "recompute": True, "tied": True, "reshard": "never"}),
])
def test_torchtitan_is_itself_on_one_process(ranks: Ranks, size: int, options: dict[str, Any]) -> None:
    check_equal("torchtitan", ranks, size, options, least=16)


@needs_titan
@pytest.mark.parametrize(("options", "words"), [
    ({"mistake": "own labels"}, "is a mean of means"),
    ({"mistake": "divided again"}, "is 1/2 (1 / the size of shard) times the right one"),
    ({"mistake": "norm of a stage", "pp": 2}, "it is that of this rank's tensors alone"),
])
def test_mistakes_in_torchtitan_are_named(ranks: Ranks, options: dict[str, Any], words: str) -> None:
    verdict = Session(str(MISTAKES), ranks).compare(options, 2)
    said = "\n".join(verdict.lines())
    assert not verdict.equal and words in said, said


@needs_nanotron
@pytest.mark.parametrize(("size", "options"), [
    (4, {"tp": 2, "mode": "reduce_scatter", "pp": 2, "tied": True, "overlap": True}),
    (4, {"tp": 2, "groups": 2, "zero": 1, "recompute": True, "z_loss": True, "interleaved": True}),
    (2, {"fp64": False, "engine": "afab", "pp": 2}),
])
def test_nanotron_is_itself_on_one_process(ranks: Ranks, size: int, options: dict[str, Any]) -> None:
    check_equal("nanotron", ranks, size, options, least=14)


@needs_nanotron
@pytest.mark.parametrize(("options", "words"), [
    ({"mistake": "tied apart", "pp": 2, "tied": True}, "is not summed over pp"),
    ({"mistake": "tied apart", "tp": 2, "mode": "reduce_scatter"}, "is not summed over tp"),
    ({"mistake": "summed over replicas"}, "is 2 (the size of dp"),
])
def test_mistakes_in_nanotron_are_named(ranks: Ranks, options: dict[str, Any], words: str) -> None:
    verdict = Session(str(BUGS.parent / "nanotron_mistakes.py"), ranks).compare(options, 2)
    said = "\n".join(verdict.lines())
    assert not verdict.equal and words in said, said


@pytest.mark.parametrize(("package", "words"), [
    ("torchtitan", r"needs torchtitan 0\.3\.0, .*; run: pip install torchtitan==0\.3\.0 triton"),
    ("nanotron", r"needs nanotron at commit 2411b02, .*; run: pip install --no-deps git\+https://.*nanotron@2411b02"),
])
def test_a_framework_that_is_not_installed_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, package: str, words: str
) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith((f"{package}.", "flash_attn")))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"megatron_port.tools.foreign.adapters.{package}", raising=False)
    with pytest.raises(ConfigError, match=words):
        find_adapter(package)
