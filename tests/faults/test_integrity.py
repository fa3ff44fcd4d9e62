"""One bit flipped in what a rank holds between two updates: the run ends, rank, tensor and bit are named.

At ZeRO-1 no other rank has the same masters and moments, and the next all-gather overwrites a flipped weight, so that
comparing replicas shows nothing. Bits are flipped in the tensors themselves, from outside of the package.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from commands import Commands
from pool import RankPool
from test_numerics import config_of, session_of
from test_watch import run

from megatron_port.core.checkpoint.reader import checkpoints_in
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Coordinates, Topology
from megatron_port.core.errors import NumericsError
from megatron_port.run.trainer import Trainer

STEP = 3
"""Updates made before the bit is flipped."""
NAME = "layers.1.mlp.up.weight"
OWNED = {"native": "layers.0.attention.qkv.weight", "deepspeed": "layers.1.mlp.down.weight"}
"""What dp rank 1 of 2 has masters and moments of, at least in part."""
GRADIENT = "reduced gradient"
WORD = {2: torch.int16, 4: torch.int32}


def short(config: RunConfig, **changes: Any) -> RunConfig:
    """As many steps as are needed, and no comparison of replicas."""
    return dataclasses.replace(
        config, training=dataclasses.replace(config.training, steps=STEP + 1),
        telemetry=dataclasses.replace(config.telemetry, replica_check_interval=0), **changes,
    )


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
    step: int = STEP
    """After so many updates."""
    after: bool = False
    """Once the step has ended, just before it is saved; else before the next one."""
    gather: bool = False
    """Before the weights of update ``step`` are gathered from their owners: other replicas get the damaged one."""


def tensor_of(engine: Any, flip: Flip) -> torch.Tensor:
    """The memory itself, 1-D."""
    if flip.kind == "weight" and engine.config.layout.zero_stage == 3:  # of which only the shard stays
        return next(p.weight for p in engine.sharded.pieces if p.record.name == flip.name)
    if flip.kind == "weight":
        return next(p for r, p in engine.named_parameters() if r.name == flip.name).detach().view(-1)
    if hasattr(engine, "sharded"):
        piece = next(p for p in engine.sharded.pieces if p.record.name == flip.name)
        found = piece.master if flip.kind == "fp32 master" else piece.state[flip.kind]
        return found
    zero = engine.engine.optimizer
    masters = engine._state.flat_masters(zero)
    group, mapping = next((g, m) for g, r, _, m in engine._state._fragments(zero) if r.name == flip.name)
    flat = masters[group] if flip.kind == "fp32 master" else zero.optimizer.state[masters[group]][flip.kind]
    return flat.detach().narrow(0, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)


def flip_in_run(config: RunConfig, topology: Topology, flip: Flip | None) -> tuple[str, int]:
    """The real loop with a flip: (its NumericsError, its exit code), or empty and 0."""
    ctx = ParallelContext.create(topology, "cpu")
    trainer = Trainer(session_of(config, ctx))
    real = trainer.state.engine.train_step

    def act(after: bool) -> None:
        if flip is None or flip.kind == GRADIENT or flip.gather or ctx.rank != flip.rank or flip.after is not after:
            return
        if trainer.state.progress.step == flip.step - after:
            memory = tensor_of(trainer.state.engine, flip)
            memory.view(WORD[memory.element_size()])[flip.element] ^= 1 << flip.bit

    def step(*args: Any, **kwargs: Any) -> Any:
        act(False)
        result = real(*args, **kwargs)
        act(True)
        return result

    trainer.state.engine.train_step = step  # type: ignore[method-assign]
    if flip is not None and flip.kind == GRADIENT:
        flip_when_reduced(trainer, flip)
    if flip is not None and flip.gather:
        flip_before_gather(trainer, flip)
    try:
        trainer.run()
        return "", 0
    except NumericsError as error:
        return str(error), error.exit_code
    finally:
        ctx.close()


def flip_when_reduced(trainer: Any, flip: Flip) -> None:
    """Make the flip once the gradients of its step are complete."""
    sharded = trainer.state.engine.sharded
    finish, piece = sharded.finish, next((p for p in sharded.pieces if p.record.name == flip.name), None)

    def finished() -> None:
        finish()
        if trainer.state.ctx.rank == flip.rank and trainer.state.progress.step == flip.step and piece is not None:
            piece.gradient.view(torch.int32)[flip.element] ^= 1 << flip.bit

    sharded.finish = finished


def flip_before_gather(trainer: Any, flip: Flip) -> None:
    """Make the flip in the shard that its rank owns, once the state of the update has been hashed."""
    sharded = trainer.state.engine.sharded
    start = sharded.start_gather
    updates = itertools.count(1)

    def gather() -> None:
        if next(updates) == flip.step and trainer.state.ctx.rank == flip.rank:
            memory = next(p.weight for p in sharded.pieces if p.record.name == flip.name)
            memory.view(WORD[memory.element_size()])[flip.element] ^= 1 << flip.bit
        start()

    sharded.start_gather = gather


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
    assert f", bit {flip.bit})" in text and f"found at step {flip.step + 1})" in text and "Leave the host out" in text


NATIVE = [(dtype, zero, kind) for dtype, zero, kinds in (
    ("fp32", 0, ("weight", "exp_avg", GRADIENT)), ("fp32", 1, ("", "weight", "exp_avg_sq")),
    ("bf16", 1, ("weight", "fp32 master", "exp_avg")), ("bf16", 2, ("", "weight", "fp32 master", "exp_avg_sq")),
    ("fp32", 3, ("weight",)), ("bf16", 3, ("", "weight", "fp32 master", GRADIENT)),
) for kind in kinds]


def test_a_flip_between_updates_names_rank_and_tensor(worlds: RankPool, tmp_path: Path) -> None:
    """Native: ZeRO-0 to 3. Without a flip nothing is said."""
    cases = []
    for number, (dtype, zero, kind) in enumerate(NATIVE):
        config = config_of(tmp_path, f"case{number}", dtype=dtype, layout={"zero_stage": zero})
        cases.append((short(config), Topology(dp=2), Flip(kind, name=OWNED["native"]) if kind else None))
    said = worlds.run(2, flips_in_runs, cases, fresh=True, timeout=200)
    for case, first, second in zip(cases, *said, strict=True):
        assert first == second
        expect(first, case[2], where="pp 0, dp 1, tp 0")


def test_a_flip_before_the_gather_is_not_taken_for_the_update(worlds: RankPool, tmp_path: Path) -> None:
    """All replicas then have the same damaged weight, so that comparing them shows nothing: the owner finds it. Of what
    was gathered, who received it finds a flip."""
    owned = OWNED["native"]
    flips = [Flip("weight", name=owned, gather=True), Flip("weight", rank=0, name=owned), Flip("weight")]
    cases = []
    for dtype, zero in (("fp32", 1), ("bf16", 1), ("bf16", 2)):
        config = config_of(tmp_path, f"{dtype}{zero}", dtype=dtype, layout={"zero_stage": zero})
        cases += [(short(config), Topology(dp=2), flip) for flip in flips]
    for said in worlds.run(2, flips_in_runs, cases, fresh=True, timeout=200):
        for found, (_, _, flip) in zip(said, cases, strict=True):
            expect(found, flip, where=f"pp 0, dp {flip.rank}, tp 0")


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_a_flip_under_deepspeed(worlds: RankPool, tmp_path: Path, dtype: str) -> None:
    config = short(config_of(tmp_path, dtype, engine="deepspeed", dtype=dtype))
    name = OWNED["deepspeed"]
    flips = [None, Flip("weight"), *(Flip(kind, name=name) for kind in ("fp32 master", "exp_avg", "exp_avg_sq"))]
    cases = [(config, Topology(dp=2), f) for f in flips]
    said = worlds.run(2, flips_in_runs, cases, deepspeed=True, fresh=True, timeout=200)
    for flip, first, second in zip(flips, *said, strict=True):
        assert first == second
        expect(first, flip, where=f"pp 0, dp {flip.rank if flip else 0}, tp 0")


def test_a_flip_in_a_stage_of_a_pipeline_and_before_a_save(worlds: RankPool, tmp_path: Path) -> None:
    """tp 2 x pp 2: no replica at all. A damaged state is not saved."""
    config = short(config_of(tmp_path, "grid", dtype="bf16", layout={"zero_stage": 1}))
    flip = Flip("exp_avg_sq", rank=2, name="layers.1.mlp.down.weight")
    early = Flip("fp32 master", rank=2, name="layers.1.mlp.down.weight", step=0)
    flips = [flip, early]
    cases = [(config, Topology(tp=2, pp=2), f) for f in flips]
    for said in worlds.run(4, flips_in_runs, cases, fresh=True, timeout=200):
        for found, wanted in zip(said, flips, strict=True):
            expect(found, wanted, where="pp 1, dp 0, tp 0")
    saves = config_of(tmp_path, "saves", dtype="fp32", layout={"zero_stage": 1}, save_interval=1)
    late = Flip("exp_avg", name=OWNED["native"], after=True)
    said = worlds.run(2, flip_in_run, saves, Topology(dp=2), late, fresh=True)
    assert said[0] == said[1] and said[0][1] == 6 and f"the exp_avg of {OWNED['native']}" in said[0][0]
    assert next(m.state.step for _, m in checkpoints_in(tmp_path / "saves" / "checkpoints")) == STEP - 1


def test_it_can_be_switched_off(worlds: RankPool, tmp_path: Path) -> None:
    config = config_of(tmp_path, "off", layout={"zero_stage": 1}, numerics={"state_check_interval": 0})
    config = dataclasses.replace(config, telemetry=dataclasses.replace(config.telemetry, replica_check_interval=1))
    assert worlds.run(2, flip_in_run, config, Topology(dp=2), Flip("weight"), fresh=True) == [("", 0), ("", 0)]


@pytest.mark.slow
def test_the_command_ends_with_exit_6(commands: Commands, tmp_path: Path) -> None:
    """The default engine and stage."""
    found = run(commands, tmp_path, "flip", rank=1, engine="deepspeed")
    assert found.code == 6, found.output
    assert re.match(r"error: rank 1 on \S+ \(pp 0, dp 1, tp 0\): the exp_avg of \S+ \(element \d+, bit 12\) changed", (
        found.errors[0])), found.output
    assert "Traceback" not in found.output and found.left == []


# ---------------------------------------------------------------- a device that computes wrongly


@dataclasses.dataclass(frozen=True)
class Faulty:
    """The rank at (pp, dp, tp, cp) computes ``module``'s output, or its gradient, wrongly: always, a little."""

    module: str
    dp: int
    pp: int = 0
    tp: int = 0
    cp: int | None = None
    backward: bool = False


def wrong(value: torch.Tensor) -> torch.Tensor:
    """A low bit of one element, as a bad adder would."""
    out = value.detach().clone()
    out.view(-1).view(WORD[out.element_size()])[3] ^= 1 << (14 if out.element_size() == 4 else 2)
    return value + (out - value).detach()


def run_with(config: RunConfig, topology: Topology, fault: Faulty | None) -> tuple[str, list[float]]:
    """The real loop on faulty devices: (its NumericsError, the losses)."""
    ctx = ParallelContext.create(topology, "cpu")
    losses: list[float] = []
    trainer = Trainer(session_of(config, ctx))
    engine: Any = trainer.state.engine
    real = engine.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if kwargs.get("probe") is None:
            losses.append(result.loss)
        return result

    engine.train_step = step
    at = ctx.coords
    if fault is not None and at == Coordinates(fault.pp, fault.dp, fault.tp, fault.cp):
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            if not fault.backward:
                return wrong(output)
            if output.requires_grad:
                output.register_hook(wrong)
            return None

        engine.stage.get_submodule(fault.module).register_forward_hook(hook)
    try:
        trainer.run()
        return "", losses
    except NumericsError as error:
        return str(error), losses
    finally:
        ctx.close()


def all_runs_with(cases: list[tuple[RunConfig, Topology, Faulty | None]]) -> list[tuple[str, list[float]]]:
    """Several runs on the same ranks."""
    return [run_with(*case) for case in cases]


def replaying(folder: Path, name: str, interval: int, **changes: Any) -> RunConfig:
    layout = {"zero_stage": 1, **changes.pop("layout", {})}
    return short(config_of(folder, name, numerics={"replay_interval": interval}, layout=layout, **changes))


def test_a_replay_names_the_rank_that_computes_wrongly(worlds: RankPool, tmp_path: Path) -> None:
    """dp 3: one rank. Without the replay the run ends well, with wrong numbers; it changes no loss of a sound run."""
    t, fault = Topology(dp=3), Faulty("layers.1.mlp.up", dp=2)
    back = Faulty("layers.0.mlp.down", dp=1, backward=True)
    configs = [replaying(tmp_path, f"case{i}", interval) for i, interval in enumerate((0, 2, 0, 2, 2))]
    configs = [dataclasses.replace(c, batch=dataclasses.replace(c.batch, global_batch_size=6)) for c in configs]
    cases = [(c, t, f) for c, f in zip(configs, (None, None, fault, fault, back))]
    said = worlds.run(3, all_runs_with, cases, fresh=True, timeout=200)
    assert said[0] == said[1] == said[2]
    (none, plain), (nothing, sound), (silent, wrong_losses), (forward, _), (backward, _) = said[0]
    assert none == nothing == silent == ""  # without the replay nobody notices
    assert sound == plain != wrong_losses
    host = socket.gethostname()
    assert "the output of layers.1.mlp.up came out with other bits" in forward and "after step 2" in forward
    assert f"again: rank 2 on {host} computes wrongly." in forward
    assert "the gradient of layers." in backward and f"again: rank 1 on {host} computes wrongly." in backward


@pytest.mark.parametrize(
    ("engine", "zero"), [("native", 1), ("native", 3), pytest.param("deepspeed", 1, marks=pytest.mark.slow)]
)
def test_a_replay_names_the_stage(worlds: RankPool, tmp_path: Path, engine: str, zero: int) -> None:
    """pp 2 x dp 2: the second stage gets the first one's wrong output and is not named. Of two replicas both are."""
    t, host = Topology(pp=2, dp=2), socket.gethostname()
    first, last = Faulty("layers.0.mlp.up", dp=1), Faulty("head", pp=1, dp=0)
    names = ("sound", "first", "last")
    options: dict[str, Any] = {"engine": engine, "dtype": "bf16", "layout": {"zero_stage": zero}}
    cases = [(replaying(tmp_path, n, 2, **options), t, f) for n, f in zip(names, (None, first, last))]
    said = worlds.run(4, all_runs_with, cases, deepspeed=engine == "deepspeed", fresh=True, timeout=200)
    (sound, _), (one, _), (two, _) = said[0]
    assert sound == "" and [text for text, _ in said[3]] == [sound, one, two]
    assert "the output of layers.0.mlp.up" in one and f"rank 0 on {host} or rank 1 on {host} computes wrongly" in one
    assert "the output of head" in two and f"rank 2 on {host} or rank 3 on {host} computes wrongly" in two


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "name"), [("tp", "tensor"), ("cp", "context")])
def test_a_replay_over_ranks_that_share_a_replica(worlds: RankPool, tmp_path: Path, axis: str, name: str) -> None:
    size: dict[str, Any] = {axis: 2}
    place: dict[str, Any] = {axis: 1}
    t, fault = Topology(dp=2, **size), Faulty("layers.0.attention.qkv", dp=0, **place)
    layout = {"context_parallel_size": t.cp}
    cases = [(replaying(tmp_path, n, 3, layout=layout), t, f) for n, f in (("sound", None), ("bad", fault))]
    said = worlds.run(4, all_runs_with, cases, fresh=True, timeout=200)
    assert all(one == said[0] for one in said)
    (sound, _), (bad, _) = said[0]
    assert sound == "" and "the output of layers.0.attention.qkv" in bad
    assert "rank 1 on" in bad and "or rank 3 on" in bad and f"another rank of its {name}-parallel group" in bad


@pytest.mark.slow
def test_a_replay_over_chunks(worlds: RankPool, tmp_path: Path) -> None:
    chunks = replaying(tmp_path, "chunks", 3, layout={"virtual_pipeline_size": 2, "zero_stage": 1})
    chunks = dataclasses.replace(chunks, model=dataclasses.replace(chunks.model, num_layers=4))
    assert worlds.run(4, run_with, chunks, Topology(pp=2, dp=2, vp=2), None, fresh=True)[0][0] == ""
