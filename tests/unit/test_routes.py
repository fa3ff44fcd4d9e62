"""Routes on disk: written by the ranks of one layout, read by those of another, resumed, damaged, of another model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contexts import rank_of
from safetensors.torch import load_file

from megatron_port.core.config.model import MoEConfig, RoutesConfig
from megatron_port.core.config.schema import ModelConfig, RunConfig, TrainingConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.rank import Fence, LeaseLost
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.step import StepContext, StepSlot
from megatron_port.ext.experts.router import ROUTES, fixed_route, note_route
from megatron_port.ext.telemetry import route_file as route_writer
from megatron_port.ext.telemetry.route_file import (
    RankRoutes,
    RouteFolder,
    RouteIdentity,
    Runs,
    Share,
    write_identity,
    write_steps,
)
from megatron_port.ext.telemetry.routes import RunRoutes

LAYERS, SEQ, GLOBAL = 6, 8, 8
CORPORA = [{"prefix": "corpus", "tokens": 1000, "bin_xxh3": "abc"}]


def truth(step: int, sample: int, layer: int, position: int, experts: int, k: int) -> list[int]:
    """The route of a token, the same whoever asks."""
    return sorted(random.Random(f"{step} {sample} {layer} {position}").sample(range(experts), k))


class Rank:
    """A rank of a run whose routers choose what :func:`truth` says."""

    def __init__(self, folder: Path, topology: Topology, rank: int, *, batch: int, done: int = 0, experts: int = 8,
                 k: int = 2, drops: bool = False, steps: int = 4, fence: Fence | None = None, **moe: Any) -> None:
        self.experts, self.k, self.batch, self.drops = experts, k, batch, drops
        self.ctx = rank_of(topology, rank)
        config = RunConfig(
            name="run", output_dir=str(folder), moe=RoutesConfig(**moe), training=TrainingConfig(steps=steps),
            model=ModelConfig(num_layers=LAYERS, seq_length=SEQ, moe=MoEConfig(num_experts=experts, top_k=k,
                                                                              first_dense=1,
                                                                              capacity_factor=float(drops))),
        )
        self.said: list[str] = []
        logger = SimpleNamespace(log_any=self.said.append)
        session: Any = SimpleNamespace(config=config, ctx=self.ctx, fence=fence or Fence(), logger=logger,
                                       is_rank_zero=rank == 0, device=SimpleNamespace(is_gpu=False))
        self.slot = StepSlot(DropoutStream(0, torch.device("cpu")))
        each = LAYERS // topology.pp
        self.layers = range(each * self.ctx.coords.pp, each * (self.ctx.coords.pp + 1))
        names = [f"layers.{n}.mlp.{'router.weight' if n else 'up.weight'}" for n in self.layers]
        engine: Any = SimpleNamespace(step_slot=self.slot, named_parameters=lambda: iter(
            [(SimpleNamespace(name=name), None) for name in names]))
        self.routes = RunRoutes(session, CORPORA)
        self.routes.attach(engine, done)

    def kept(self, chosen: torch.Tensor) -> torch.Tensor | None:
        """Experts that drop no token: those with an even number, where any may be dropped."""
        return chosen % 2 == 0 if self.drops else None

    def micro_batches(self, step: int) -> list[MicroBatch]:
        dp, own = self.ctx.size("dp"), self.ctx.index("dp")
        return [
            MicroBatch(tokens=None, labels=None, loss_mask=None, sample_ids=tuple(
                step * GLOBAL + (m * dp + own) * self.batch + i for i in range(self.batch)))
            for m in range(GLOBAL // dp // self.batch)
        ]

    def contexts(self, step: int) -> Iterator[tuple[int, StepContext, torch.Tensor]]:
        """(layer, context, choice of the router) of each pass of each layer of experts."""
        rows, tp = SEQ // self.ctx.size("tp"), self.ctx.index("tp")
        for batch in self.micro_batches(step):
            self.slot.announce(step, batch.sample_ids)
            context = self.slot.current
            assert context is not None
            for layer in (n for n in self.layers if n):
                yield layer, context, torch.tensor([
                    truth(step, sample, layer, position, self.experts, self.k)
                    for position in range(rows * tp, rows * (tp + 1)) for sample in batch.sample_ids])

    def step(self, step: int) -> None:
        self.routes.begin_step(step, self.micro_batches(step))
        for layer, context, chosen in self.contexts(step):
            assert context.keepers[ROUTES] is self.routes
            note_route(context, layer, chosen, self.kept(chosen))
            note_route(context.again(), layer, chosen * 0, None)  # recomputed: not counted, not kept
        self.routes.end_step()
        for layer, context, chosen in self.contexts(step):
            note_route(context, layer, chosen * 0, None)  # the step is replayed to look at it

    def follows(self, step: int) -> None:
        """Check that every pass gets the routes of the run that was logged."""
        self.routes.begin_step(step, self.micro_batches(step))
        for layer, context, chosen in self.contexts(step):
            fixed = fixed_route(context, layer)
            assert fixed is not None and fixed[0].dtype == torch.int64 and torch.equal(fixed[0], chosen)
            kept = self.kept(chosen)
            assert fixed[1].all() if kept is None else torch.equal(fixed[1], kept)


def ranks(folder: Path, topology: Topology, **more: Any) -> list[Rank]:
    return [Rank(folder, topology, n, **more) for n in range(topology.world_size)]


def log(folder: Path, topology: Topology, steps: Sequence[int] = range(4), **more: Any) -> Path:
    for rank in ranks(folder, topology, routes="log", done=steps[0], **more):
        for step in steps:
            rank.step(step)
        rank.routes.close()
    return folder / "run" / "routes"


LAYOUTS = [Topology(), Topology(tp=2, dp=2), Topology(tp=4, pp=2), Topology(pp=3, dp=4)]


@pytest.mark.parametrize(("experts", "k", "drops", "kind"), [
    (256, 2, False, torch.uint8), (129, 3, True, torch.uint16),
])
def test_any_layout_reads_what_any_other_wrote(
    tmp_path: Path, experts: int, k: int, drops: bool, kind: torch.dtype
) -> None:
    shape: dict[str, Any] = {"experts": experts, "k": k, "drops": drops}
    for i, written in enumerate(LAYOUTS):
        folder = log(tmp_path / str(i), written, range(2), batch=2, **shape)
        files = list(folder.glob("*.safetensors"))
        assert len(files) == written.world_size
        tensors = load_file(files[0])
        assert set(tensors) == {"1", "2"} and tensors["1"].dtype == kind
        size = sum(t.numel() for f in files for t in load_file(f).values())
        assert size == 2 * GLOBAL * SEQ * (LAYERS - 1) * k  # every token of every layer once
        for read in (LAYOUTS[i - 1], LAYOUTS[i - 2]):
            for rank in ranks(tmp_path / "other", read, batch=1, replay=str(folder), steps=2, **shape):
                for step in range(2):
                    rank.follows(step)


def test_evaluation_and_other_steps_are_routed_anew(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "b", Topology(), 0, batch=2, replay=str(log(tmp_path / "a", Topology(dp=2), batch=2)))
    rank.follows(1)
    rank.slot.stream.enabled = False
    rank.slot.announce(1, (8, 9))
    assert rank.slot.current is not None and not rank.slot.current.keepers
    rank.slot.stream.enabled = True
    rank.slot.announce(2, (8, 9))
    assert rank.routes.fixed(1, rank.slot.current) is None
    two = Rank(tmp_path / "b", Topology(dp=2), 0, batch=1, replay=str(tmp_path / "a" / "run" / "routes"))
    two.follows(1)
    two.slot.announce(1, (9,))  # of the other replica, in a check of devices
    context = two.slot.current
    assert context is not None
    fixed = two.routes.fixed(3, context)
    assert fixed is not None and fixed[0].tolist() == [truth(1, 9, 3, i, 8, 2) for i in range(SEQ)]


def test_a_resumed_run_leaves_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after a save, resumed on another layout: its later steps, and what was half written, are gone."""
    monkeypatch.setattr(route_writer, "FILE_BYTES", 1)  # a file a step
    folder = log(tmp_path, Topology(dp=2), range(3), batch=1)
    log(tmp_path, Topology(), [2, 3], batch=2)
    names = sorted(path.name.split(".")[0] for path in folder.glob("*.safetensors"))
    assert names == [f"steps-{n:08d}-{n:08d}" for n in (1, 1, 2, 2, 3, 4)]
    Rank(tmp_path / "c", Topology(), 0, batch=4, replay=str(folder)).follows(3)


class Taken(Fence):
    """A folder that another attempt takes over."""

    taken = False

    def check(self) -> None:
        if self.taken:
            raise LeaseLost("taken")


def test_a_full_disk_and_a_lost_lease_do_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fence = Taken()
    rank = Rank(tmp_path, Topology(), 0, batch=4, routes="log", fence=fence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route_writer, "write_steps", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        rank.step(0)
        rank.routes.flush()
    rank.step(1)
    rank.routes.flush()
    assert len(rank.said) == 1 and "No space left; the routes of steps 1 to 1 are lost" in rank.said[0]
    guarded: list[int] = []
    fence.taken = True
    monkeypatch.setattr(route_writer, "write_steps", lambda *a: (guarded.append(1), write_steps(*a)))
    for step in (2, 3):
        rank.step(step)
        rank.routes.flush()
    rank.routes.close()
    assert [p.name for p in (tmp_path / "run" / "routes").iterdir() if p.suffix == ".safetensors"] == [
        "steps-00000002-00000002.rank-00000.safetensors"]
    assert guarded == [1] and len(rank.said) == 1


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    folder = log(tmp_path, Topology(dp=2), batch=2)

    def refused(error: type[Exception], text: str, **more: Any) -> None:
        with pytest.raises(error, match=text):
            Rank(tmp_path / "b", Topology(), 0, batch=2, **{"replay": str(folder), **more}).follows(3)

    refused(ConfigError, "not a folder of routes .FileNotFoundError.*", replay=str(tmp_path))
    refused(ConfigError, "num_experts 8 there, 9 here; top_k 2 there, 3 here", experts=9, k=3)
    with pytest.raises(ConfigError, match="is the folder that this run writes to"):
        Rank(tmp_path, Topology(), 0, batch=2, replay=str(folder), routes="log")
    path = sorted(folder.glob("*rank-00001*"))[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(DataError, "rank-00001.safetensors is damaged .*checksum of step 4")
    path.write_bytes(whole[:100])
    refused(DataError, "rank-00001.safetensors is damaged")
    path.unlink()
    refused(DataError, r"no route of step 4, sample 26, layer 1, position 0 \(160 of 320 are missing\)")
    for one in folder.glob("steps*"):
        one.unlink()
    refused(ConfigError, "step 4 is missing: this run takes steps 4 to 4, the folder holds none")


def test_common_rows_of_shares_in_several_runs(tmp_path: Path) -> None:
    """Positions in two runs, as a division of the sequence gives them: read back by other runs."""
    write_identity(tmp_path, RouteIdentity(num_experts=16, top_k=1, layers=(0,), seq_length=12, seed=0))
    parts: list[Runs] = [((0, 3), (9, 3)), ((3, 6),)]

    def routes(step: int, *runs: Runs) -> RankRoutes:
        """The expert of a position has its number."""
        rows = [[start + i for start, length in of_sample for i in range(length)] for of_sample in runs]
        experts = torch.tensor(rows, dtype=torch.uint8).view(1, len(runs), -1, 1).numpy()
        return RankRoutes(step, (5, 6)[: len(runs)], experts, runs if step == 2 else ())

    for rank, (runs, other) in enumerate(zip(parts, reversed(parts))):  # in the second step each sample has its own
        write_steps(tmp_path, rank, [routes(1, runs), routes(2, runs, other)], Share((0,), runs))
    found, wanted = RouteFolder(tmp_path), Share((0,), ((7, 4), (1, 4)))
    for step, samples in ((1, (5,)), (2, (6, 5))):
        assert found.read(step, samples, wanted).reshape(len(samples), -1).tolist() == [
            [7, 8, 9, 10, 1, 2, 3, 4]
        ] * len(samples)
