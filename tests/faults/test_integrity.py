"""One bit flipped in what a rank holds between two updates: the run ends, rank, tensor and bit are named.

At ZeRO-1 no other rank has the same masters and moments, and the next all-gather overwrites a flipped weight, so that
comparing replicas shows nothing. Bits are flipped in the tensors themselves, from outside of the package.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from pool import RankPool
from test_numerics import config_of, session_of

from megatron_port.checkpoint.reader import checkpoints_in
from megatron_port.config.schema import RunConfig
from megatron_port.errors import NumericsError
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.topology import Topology
from megatron_port.train.loop import Trainer

STEP = 3
"""Updates made before the bit is flipped."""
NAME = "layers.1.mlp.up.weight"
OWNED = {"native": "layers.0.attention.qkv.weight", "deepspeed": "layers.1.mlp.down.weight"}
"""What dp rank 1 of 2 has masters and moments of, at least in part."""
WORD = {2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module")
def worlds() -> Iterator[RankPool]:
    """Ranks of this module's own."""
    pool = RankPool()
    yield pool
    pool.close()


@dataclasses.dataclass(frozen=True)
class Flip:
    """Bit ``bit`` of element ``element`` of what ``rank`` has of a parameter's ``kind``."""

    kind: str
    rank: int = 1
    bit: int = 12
    element: int = 5
    name: str = NAME
    after: bool = False
    """Once the step has ended, just before it is saved; else before the next one."""


def tensor_of(engine: Any, flip: Flip) -> torch.Tensor:
    """The memory itself, 1-D."""
    if flip.kind == "weight":
        return next(p for r, p in engine.named_parameters() if r.name == flip.name).detach().view(-1)
    if hasattr(engine, "sharded"):
        piece = next(p for p in engine.sharded.pieces if p.record.name == flip.name)
        state = engine.update.state[piece.master]
        found = piece.master if flip.kind == "fp32 master" else state[flip.kind]
        return found
    zero = engine.engine.optimizer
    masters = engine._state.flat_masters(zero)
    group, mapping = next((g, m) for g, r, _, m in engine._state._fragments(zero) if r.name == flip.name)
    flat = masters[group] if flip.kind == "fp32 master" else zero.optimizer.state[masters[group]][flip.kind]
    return flat.detach().narrow(0, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)


def flip_in_run(config: RunConfig, topology: Topology, flip: Flip | None) -> tuple[str, int]:
    """The real loop with a flip after ``STEP`` updates: (its NumericsError, its exit code), or empty and 0."""
    ctx = ParallelContext.create(topology, "cpu")
    trainer = Trainer(session_of(config, ctx))
    real = trainer.engine.train_step

    def act(after: bool) -> None:
        mine = flip is not None and ctx.rank == flip.rank and flip.after is after
        if mine and trainer.progress.step == STEP - after:
            memory = tensor_of(trainer.engine, flip)
            memory.view(WORD[memory.element_size()])[flip.element] ^= 1 << flip.bit

    def step(*args: Any, **kwargs: Any) -> Any:
        act(False)
        result = real(*args, **kwargs)
        act(True)
        return result

    trainer.engine.train_step = step  # type: ignore[method-assign]
    try:
        trainer.run()
        return "", 0
    except NumericsError as error:
        return str(error), error.exit_code
    finally:
        ctx.close()


def flips_in_runs(cases: list[tuple[RunConfig, Topology, Flip | None]]) -> list[tuple[str, int]]:
    """Several runs on the same ranks."""
    return [flip_in_run(*case) for case in cases]


def expect(found: tuple[str, int], flip: Flip | None, *, where: str) -> None:
    text, code = found
    if flip is None:
        assert (text, code) == ("", 0)
        return
    assert code == 6, flip
    place = f"rank {flip.rank} on {socket.gethostname()} ({where})"
    assert text.startswith(f"{place}: the {flip.kind} of {flip.name}"), text
    assert f", bit {flip.bit})" in text and f"found at step {STEP + 1})" in text and "Leave the host out" in text


NATIVE = [(dtype, zero, kind) for dtype, zero, kinds in (
    ("fp32", 0, ("", "weight", "exp_avg")), ("fp32", 1, ("", "weight", "exp_avg_sq")),
    ("bf16", 1, ("", "weight", "fp32 master", "exp_avg")), ("bf16", 2, ("", "weight", "fp32 master", "exp_avg_sq")),
) for kind in kinds]


def test_a_flip_between_updates_names_rank_and_tensor(worlds: RankPool, tmp_path: Path) -> None:
    """Native: ZeRO-0, 1 and 2. Without a flip nothing is said."""
    cases = []
    for number, (dtype, zero, kind) in enumerate(NATIVE):
        config = config_of(tmp_path, f"case{number}", dtype=dtype, layout={"zero_stage": zero})
        config = dataclasses.replace(config, telemetry=dataclasses.replace(config.telemetry, replica_check_interval=0))
        cases.append((config, Topology(dp=2), Flip(kind, name=OWNED["native"]) if kind else None))
    said = worlds.run(2, flips_in_runs, cases, fresh=True, timeout=200)
    for case, first, second in zip(cases, *said, strict=True):
        assert first == second
        expect(first, case[2], where="pp 0, dp 1, tp 0")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_flip_under_deepspeed(worlds: RankPool, tmp_path: Path, dtype: str) -> None:
    config = dataclasses.replace(config_of(tmp_path, dtype, engine="deepspeed", dtype=dtype))
    config = dataclasses.replace(config, telemetry=dataclasses.replace(config.telemetry, replica_check_interval=0))
    name = OWNED["deepspeed"]
    flips = [None, Flip("weight"), *(Flip(kind, name=name) for kind in ("fp32 master", "exp_avg", "exp_avg_sq"))]
    cases = [(config, Topology(dp=2), f) for f in flips]
    said = worlds.run(2, flips_in_runs, cases, deepspeed=True, fresh=True, timeout=200)
    for flip, first, second in zip(flips, *said, strict=True):
        assert first == second
        expect(first, flip, where=f"pp 0, dp {flip.rank if flip else 0}, tp 0")


def test_a_flip_in_a_stage_of_a_pipeline_and_before_a_save(worlds: RankPool, tmp_path: Path) -> None:
    """tp 2 x pp 2: no replica at all. A damaged state is not saved."""
    config = config_of(tmp_path, "grid", dtype="bf16", layout={"zero_stage": 1})
    flip = Flip("exp_avg_sq", rank=2, name="layers.1.mlp.down.weight")
    for first in worlds.run(4, flip_in_run, config, Topology(tp=2, pp=2), flip, fresh=True, timeout=200):
        expect(first, flip, where="pp 1, dp 0, tp 0")
    saves = config_of(tmp_path, "saves", dtype="fp32", layout={"zero_stage": 1}, save_interval=1)
    late = Flip("exp_avg", name=OWNED["native"], after=True)
    said = worlds.run(2, flip_in_run, saves, Topology(dp=2), late, fresh=True)
    assert said[0] == said[1] and said[0][1] == 6 and f"the exp_avg of {OWNED['native']}" in said[0][0]
    assert next(m.state.step for _, m in checkpoints_in(tmp_path / "saves" / "checkpoints")) == STEP - 1


def test_it_can_be_switched_off(worlds: RankPool, tmp_path: Path) -> None:
    config = config_of(tmp_path, "off", layout={"zero_stage": 1}, numerics={"state_check_interval": 0})
    config = dataclasses.replace(config, telemetry=dataclasses.replace(config.telemetry, replica_check_interval=1))
    assert worlds.run(2, flip_in_run, config, Topology(dp=2), Flip("weight"), fresh=True) == [("", 0), ("", 0)]
