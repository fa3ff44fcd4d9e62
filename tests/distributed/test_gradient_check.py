"""One wrong bit in a reduced gradient: found on every ZeRO stage, wherever it flips; nothing is said of sound ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import LR, make_batches, make_config
from pool import RankPool

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.health.gradient_check import SUM_ROW, RowSums, allowed
from megatron_port.run.build import build_engine

STEP = 1
"""Of two, in which the bit flips."""


@dataclasses.dataclass(frozen=True)
class Flip:
    """A bit of an element of ``rank``'s gradient of ``name`` (empty: of which it has most): in what a reduction gives
    (``reduction``), once it has been taken (``rest``), or when the step's sums are complete (``sums``)."""

    where: str
    bit: int
    rank: int = 1
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """A run, its layout and its flip; ``words``: what is said on that rank, or on the first that speaks."""

    topology: Topology
    layout: dict[str, Any]
    flip: Flip | None
    words: str = ""
    dtype: Any = "fp32"
    reduce: Any = "fp32"

    @property
    def config(self) -> RunConfig:
        model = {"tie_embeddings": True, "num_layers": self.topology.pp}
        config = make_config(dtype=self.dtype, layout=dict(self.layout), model=model)
        precision = dataclasses.replace(config.precision, grad_reduce_dtype=self.reduce)
        return dataclasses.replace(config, precision=precision)


def flip_bit(memory: torch.Tensor, bit: int) -> None:
    """Flip a bit of the largest element."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[memory.element_size()]
    memory.view(word)[memory.abs().argmax()] ^= 1 << bit


@dataclasses.dataclass
class Wrong:
    """A reduction that gives something else."""

    work: Any
    change: Callable[[], None]

    def wait(self) -> None:
        self.work.wait()
        self.change()


def damages(case: Case) -> tuple[list[str], str]:
    """What the engine says of each step on this rank, and in what gradient the bit was flipped."""
    ctx = ParallelContext.create(case.topology, "cpu")
    engine: Any = build_engine(case.config, ctx, torch_providers())
    sharded, flip, batches = engine.sharded, case.flip, make_batches(case.config, ctx)
    piece: Any = None
    bucket: Any = None
    if flip is not None and flip.rank == ctx.rank:
        sizes = [p.gradient.numel() * (flip.name in ("", p.record.name)) for p in sharded.pieces]
        at = sizes.index(max(sizes))
        piece, bucket = sharded.pieces[at], sharded.shard_buckets[at]
    settle, finish, done = sharded._finish_reduction, sharded.finish, list[int]()
    step = 0

    def once(where: str, memory: torch.Tensor) -> None:
        if flip is not None and flip.where == where and step == STEP and not done and bool(memory.any()):
            done.append(step)
            flip_bit(memory, flip.bit)

    def settled() -> bool:
        taken: Any = sharded._reducing[0] if sharded._reducing else None
        if taken is not None and taken is bucket and piece is not None:
            flat = taken.gradients if taken.reduce_buffer is None else taken.reduce_buffer
            at = piece.gradient.storage_offset() - bucket.sums.storage_offset()
            part = flat[taken.shard_slice][at : at + piece.gradient.numel()]
            taken.reducing = Wrong(taken.reducing, lambda: once("reduction", part))
        out: bool = settle()
        if taken is not None and taken is bucket and piece is not None:
            once("rest", piece.gradient)
        return out

    def finished() -> None:
        finish()
        if piece is not None:
            once("sums", piece.gradient)

    sharded._finish_reduction, sharded.finish = settled, finished
    said = []
    for step in range(STEP + 1):
        engine.train_step(batches(step), step=step, lr=LR)
        damage = engine.state_damage()
        said.append("" if damage is None else f"{damage} {damage.how}; {damage.cause}")
    assert bool(done) == (piece is not None)
    ctx.close()
    return said, "" if piece is None else piece.record.name


def all_damages(cases: list[Case]) -> list[tuple[list[str], str]]:
    return [damages(case) for case in cases]


REST, SUM, COPIES = "changed between its reduction and the update", "is not the sum", "has other bits on some of ranks"
DP2 = Topology(dp=2)
CASES = [
    Case(DP2, {"zero_stage": 0}, Flip("sums", 0), REST),
    Case(DP2, {"zero_stage": 0}, Flip("reduction", 0), COPIES),
    *(Case(DP2, {"zero_stage": z}, Flip(where, bit, rank), words) for z, where, bit, rank, words in (
        (1, "rest", 0, 1, REST), (2, "rest", 30, 0, REST), (3, "sums", 3, 1, REST),
        (1, "reduction", 14, 0, SUM), (2, "reduction", 16, 1, SUM), (3, "reduction", 31, 1, SUM),
    )),
    Case(DP2, {"zero_stage": 1}, Flip("reduction", 14), SUM, "bf16", "bf16"),
    Case(DP2, {"zero_stage": 2}, None, "", "fp16", "fp16"),
    Case(DP2, {"zero_stage": 3}, Flip("reduction", 40), SUM, "fp64"),
]
FOUR = [
    Case(Topology(tp=2, dp=2), {"sequence_parallel": True, "zero_stage": 2}, None),
    Case(Topology(dp=2, pp=2), {"zero_stage": 1}, Flip("sums", 4, rank=0, name="embedding.word.weight"), REST),
    Case(Topology(tp=2, pp=2), {"sequence_parallel": True}, Flip("sums", 4, rank=3, name="final_norm.weight"), REST),
    Case(Topology(dp=4, shard=2), {"zero_stage": 3, "shard_size": 2}, Flip("sums", 0, rank=2), REST),
    Case(Topology(dp=4), {"zero_stage": 0}, Flip("reduction", 1, rank=2), COPIES),
]


@pytest.mark.parametrize(
    ("world", "cases"), [(2, CASES), pytest.param(4, FOUR, marks=pytest.mark.slow)], ids=["2", "4"]
)
def test_a_flip_in_a_reduced_gradient_is_found(ranks: RankPool, world: int, cases: list[Case]) -> None:
    """The rank that holds it speaks, unless only the copies tell: then one of them, by majority where it can."""
    results = ranks.run(world, all_damages, cases, timeout=200)
    for number, case in enumerate(cases):
        said = [result[number][0] for result in results]
        assert all(line == "" for steps in said for line in steps[:STEP]), (case, said)
        speaking = [rank for rank, steps in enumerate(said) if steps[STEP]]
        if case.flip is None:
            assert speaking == [], (case, said)
            continue
        assert len(speaking) == 1, (case, said)
        text, name = said[speaking[0]][STEP], results[case.flip.rank][number][1]
        assert text.startswith("the reduced gradient of ") and case.words in text, (case, text)
        if case.words == COPIES:
            assert name in text and f"rank {case.flip.rank} on" in text, (case, text)
        else:
            assert speaking == [case.flip.rank], (case, said)
            assert name in text and (case.words != REST or f"bit {case.flip.bit})" in text), (case, text)


def test_rounding_stays_within_the_bound_and_a_change_does_not() -> None:
    """Sums of many ranks' gradients of many sizes in fp32 and bf16, added one after the other, as a ring would."""
    generator = torch.Generator().manual_seed(5)
    rows = RowSums(torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        for count in (2, 8, 64):
            given = torch.randn(count, 8 * SUM_ROW + 77, generator=generator)
            given = (given * 10.0 ** torch.randint(-6, 1, (given.shape[1],), generator=generator)).to(dtype)
            total = given[0].clone()
            for part in given[1:]:
                total += part
            wanted, squares = torch.stack([rows(part)[0] for part in given]).sum(dim=0).unbind(-1)
            bound = allowed(squares, count, dtype)
            assert bool(((rows(total)[0, :, 0] - wanted).abs() < 0.3 * bound).all())
            at = total.abs().argmax()
            total[at] *= 1 + 2**-7
            off = (rows(total)[0, :, 0] - wanted).abs() > bound
            if dtype == torch.float32:
                assert off.nonzero().flatten().tolist() == [int(at) // SUM_ROW]
