"""Numbers that cannot be trusted, put in by hand: found, named, and not applied. And a flipped bit in one replica.

Faults come in through hooks on the model's modules, as a broken device would: product code knows nothing of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from cases import make_config, providers_of
from pool import RankFailed, RankPool

from megatron_port.core.config.checks import resolve
from megatron_port.core.config.schema import CheckpointConfig, NumericsConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import NumericsError
from megatron_port.core.io.logging import Logger
from megatron_port.core.train.hooks import Session
from megatron_port.ext.health.replicas import check_replicas
from megatron_port.run.device import choose_device
from megatron_port.run.trainer import Trainer

STEPS, BATCH = 6, 8


@pytest.fixture(scope="module")
def worlds() -> Iterator[RankPool]:
    """Ranks of this module's own: signal handlers are changed in them."""
    pool = RankPool()
    yield pool
    pool.close()


@dataclass(frozen=True)
class Fault:
    """On the rank at (pp, dp, tp), when ``sample`` passes ``module``: its output or gradient times ``factor``."""

    module: str
    sample: int
    factor: float
    pp: int = 0
    dp: int = 0
    tp: int = 0
    times: int = 1_000_000
    """How often; 1: transient."""
    backward: bool = False


@dataclass
class Seen:
    """What a rank reports of a run."""

    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    anomalies: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    finite: bool = True
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def config_of(folder: Path, name: str, **changes: Any) -> RunConfig:
    engine = changes.pop("engine", "native")
    layout = {"zero_stage": 0 if engine == "native" else 1, **changes.pop("layout", {})}
    config = make_config(
        engine=engine, dtype=changes.pop("dtype", "fp32"), model={"num_layers": 2, "hidden_dropout": 0.1},
        layout=layout, micro_batch_size=1, global_batch_size=BATCH, own_kernels=changes.pop("own_kernels", "off"),
    )
    save = changes.pop("save_interval", 0)
    return dataclasses.replace(
        config, name=name, output_dir=str(folder),
        data=dataclasses.replace(config.data, synthetic=True),
        optimizer=dataclasses.replace(config.optimizer, lr=1e-3),
        training=dataclasses.replace(config.training, steps=STEPS),
        checkpoint=CheckpointConfig(save_interval=save, save_final=False),
        telemetry=dataclasses.replace(config.telemetry, replica_check_interval=1),
        numerics=NumericsConfig(**{"window": 4, **changes.pop("numerics", {})}), **changes,
    )


def session_of(config: RunConfig, ctx: ParallelContext) -> Session:
    world = ctx.topology.world_size
    info = ProcessInfo(
        rank=ctx.rank, world_size=world, local_rank=ctx.rank, local_world_size=world, node_rank=0, num_nodes=1,
        master_addr="127.0.0.1", master_port=0, launcher="single", hostname=socket.gethostname(),
    )
    return Session(
        resolve(config, world), info, choose_device("cpu"), ctx, providers_of(config), Logger(ctx.rank)
    )


def inject(trainer: Trainer, fault: Fault) -> None:
    """Hang the fault on this rank's module, if it is the rank."""
    at = trainer.state.ctx.coords
    if (at.pp, at.dp, at.tp) != (fault.pp, fault.dp, fault.tp):
        return
    engine: Any = trainer.state.engine
    left = [fault.times]

    def hook(module: Any, inputs: Any, outputs: Any) -> Any:
        key = engine.step_slot.current
        output, *more = outputs if isinstance(outputs, tuple) else (outputs,)  # a norm returns its input as well
        if not engine.stream.enabled or fault.sample not in key.sample_ids or not left[0]:
            return None
        left[0] -= 1
        if not fault.backward:
            return (output * fault.factor, *more) if more else output * fault.factor
        output.register_hook(lambda grad: grad * fault.factor)
        return None

    engine.stage.get_submodule(fault.module).register_forward_hook(hook)


def train(config: RunConfig, topology: Topology, fault: Fault | None, left_out: tuple[int, ...] = ()) -> Seen:
    """A run of the real loop on this rank; ``left_out``: positions of steps' samples that are never to be used."""
    if config.precision.dtype == "fp16" and config.engine == "deepspeed":
        from deepspeed.accelerator import get_accelerator

        type(get_accelerator()).is_fp16_supported = lambda self: True
    ctx = ParallelContext.create(topology, "cpu")
    seen = Seen()
    trainer = Trainer(session_of(config, ctx))
    for first in left_out:
        trainer.state.numerics.leave_out(first, BATCH)
    if fault is not None:
        inject(trainer, fault)
    try:
        trainer.run()
    except NumericsError as error:
        seen.error = str(error)
    folder = Path(config.output_dir) / config.name
    if ctx.rank == 0:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        seen.metrics = [json.loads(line) for line in lines]
        seen.losses = [float(r["loss"]) for r in seen.metrics if "loss" in r]
        seen.anomalies = {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("anomaly-*.json"))}
    seen.weights = {r.name: p.detach().clone() for r, p in trainer.state.engine.named_parameters()}
    seen.finite = all(bool(torch.isfinite(w).all()) for w in seen.weights.values())
    ctx.close()
    return seen


def train_all(cases: list[tuple[RunConfig, Topology, Fault | None, tuple[int, ...]]]) -> list[Seen]:
    """Several runs on the same ranks."""
    return [train(*case) for case in cases]


def sample_of(step: int, micro_batch: int, replica: int, replicas: int) -> int:
    """Law of docs/architecture.md with one sample a micro-batch; ``step`` from 0."""
    return step * BATCH + micro_batch * replicas + replica


def only(seen: Seen) -> dict[str, Any]:
    assert len(seen.anomalies) == 1, seen.anomalies.keys()
    return next(iter(seen.anomalies.values()))


def names(report: dict[str, Any], *, step: int, fault: Fault, micro_batch: int) -> None:
    """The report names the rank that was hit, its micro-batch and sample."""
    culprit = report["culprit"]
    assert report["step"] == step + 1 and report["first_sample"] == step * BATCH
    assert (culprit["pp"], culprit["dp"], culprit["tp"]) == (fault.pp, fault.dp, fault.tp), report
    assert culprit["micro_batch"] == micro_batch and culprit["sample_ids"] == [fault.sample], report
    assert culprit["host"] == socket.gethostname()


# ---------------------------------------------------------------- forward, backward, spike, transient; skip, stop


@pytest.mark.slow  # a pipeline's is found and named below
def test_nan_in_native_is_found_and_named(worlds: RankPool, tmp_path: Path) -> None:
    """tp 2 x pp 1 x dp 2: the step is not applied, and rank, micro-batch, sample and module are right."""
    t, bad, m = Topology(tp=2, dp=2), 3, 2
    sample = sample_of(bad, m, 1, 2)
    forward = Fault("layers.1.mlp.up", sample, math.nan, dp=1, tp=1)
    backward = Fault("layers.0.attention.qkv", sample, math.inf, dp=1, backward=True)
    once = dataclasses.replace(forward, times=1)
    spike = Fault("head", sample, 1e3, dp=1, tp=0)
    cases = [
        (config_of(tmp_path, "clean"), t, None, ()),
        (config_of(tmp_path, "forward"), t, forward, ()),
        (config_of(tmp_path, "backward"), t, backward, ()),
        (config_of(tmp_path, "once"), t, once, ()),
        (config_of(tmp_path, "spike"), t, spike, ()),
        (config_of(tmp_path, "stop", numerics={"on_anomaly": "stop"}), t, forward, ()),
        (config_of(tmp_path, "many", numerics={"max_anomalies": 1}), t, forward, ()),
    ]
    ranks = worlds.run(4, train_all, cases, fresh=True, timeout=200)
    clean, fwd, bwd, one, spiked, stopped, many = ranks[0]
    assert not clean.anomalies and len(clean.losses) == STEPS

    for seen in (fwd, bwd, one, spiked):
        assert not seen.error and len(seen.losses) == STEPS and seen.finite
        assert [r["skipped"] for r in seen.metrics] == [i == bad for i in range(STEPS)]
        assert seen.metrics[-1]["anomalies_total"] == seen.metrics[-1]["skipped_total"] == 1
        assert seen.losses[:bad] == clean.losses[:bad]
    # Not applied is not applied: whatever went wrong, what follows is the same to the bit.
    assert fwd.losses[bad + 1 :] == bwd.losses[bad + 1 :] == one.losses[bad + 1 :] == spiked.losses[bad + 1 :]
    assert all(torch.equal(a, b) for r in ranks for a, b in zip(r[1].weights.values(), r[2].weights.values()))
    assert fwd.losses[bad + 1 :] != clean.losses[bad + 1 :]

    report = only(fwd)
    names(report, step=bad, fault=forward, micro_batch=m)
    assert report["verdict"] == "reproducible" and report["replay"]["same_bits"] is True
    assert report["culprit"]["phase"] == "forward" and report["culprit"]["module"] == "layers.1.mlp.up"
    assert report["loss"] == "NaN" and report["grad_norm"] is None
    assert "layers.0.attention.qkv.weight" in report["culprit"]["non_finite_gradients"]

    report = only(bwd)
    names(report, step=bad, fault=backward, micro_batch=m)
    assert report["culprit"]["phase"] == "backward" and report["verdict"] == "reproducible"
    assert isinstance(report["loss"], float)
    assert "layers.0.attention.qkv.weight" in report["culprit"]["non_finite_gradients"]
    assert "layers.1.mlp.down.weight" not in report["culprit"]["non_finite_gradients"]

    report = only(one)
    assert report["verdict"] == "transient" and report["replay"]["same_bits"] is False
    culprit = report["culprit"]
    assert culprit["dp"] == 1 and culprit["micro_batch"] == m and culprit["sample_ids"] == [sample]
    assert "suspect the hardware" in report["summary"] and socket.gethostname() in report["summary"]

    report = only(spiked)
    assert "above its limit" in report["reason"] and report["verdict"] == "reproducible"
    assert report["culprit"]["dp"] == 1 and report["culprit"]["sample_ids"] == [sample]

    for seen, text in ((stopped, "the loss is nan"), (many, "1 anomalies within 1,000 steps")):
        assert text in seen.error and f"step {bad + 1}" in seen.error and "micro-batch 2" in seen.error
        assert len(seen.losses) == bad + 1 and seen.finite and len(seen.anomalies) == 1
    assert len({r[5].error for r in ranks}) == 1


@pytest.mark.parametrize("engine", ["native", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_nan_in_a_pipeline(worlds: RankPool, tmp_path: Path, engine: str) -> None:
    """pp 2 x dp 2: the stage where it begins is named, not those that it reaches."""
    t, bad, m = Topology(pp=2, dp=2), 3, 1
    sample = sample_of(bad, m, 1, 2)
    first = Fault("layers.0.attention.output", sample, math.nan, pp=0, dp=1)
    last = Fault("layers.0.norm1", sample, math.nan, pp=1, dp=1)  # the stage's own number; the model's is 1
    back = Fault("layers.0.mlp.down", sample, math.nan, pp=1, dp=1, backward=True)
    spike = Fault("head", sample, 1e3, pp=1, dp=1)
    once = dataclasses.replace(back, times=1)
    faults = {"first": first, "last": last, "back": back, "spike": spike, "once": once}
    cases = [(config_of(tmp_path, name, engine=engine), t, fault, ()) for name, fault in faults.items()]
    runs = worlds.run(4, train_all, cases, deepspeed=engine == "deepspeed", fresh=True, timeout=200)[0]
    for (name, fault), seen in zip(faults.items(), runs):
        assert not seen.error and seen.finite and len(seen.losses) == STEPS
        assert [r["skipped"] for r in seen.metrics] == [i == bad for i in range(STEPS)], name
        report = only(seen)
        if name == "once":
            assert report["verdict"] == "transient"
            assert engine == "deepspeed" or report["culprit"]["pp"] == 1
            continue
        names(report, step=bad, fault=fault, micro_batch=m)
        assert report["verdict"] == "reproducible" and report["replay"]["same_bits"] is True
        if name == "last":
            assert report["culprit"]["module"].startswith("layers.1.norm1")
        if name == "back":
            assert report["culprit"]["phase"] == "backward" and isinstance(report["loss"], float)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_deepspeed_in_half_precision(worlds: RankPool, tmp_path: Path, dtype: str) -> None:
    """Its other two optimizers. A spike leaves masters, moments and the loss scale as they were."""
    t, bad = Topology(dp=2), 4
    sample = sample_of(bad, 1, 1, 2)
    config = config_of(tmp_path, dtype, engine="deepspeed", dtype=dtype)
    spike = Fault("head", sample, 1e3, dp=1)
    seen = worlds.run(2, train, config, t, spike, deepspeed=True)[0]
    assert [r["skipped"] for r in seen.metrics] == [i == bad for i in range(STEPS)]
    names(only(seen), step=bad, fault=spike, micro_batch=1)
    assert seen.finite and {r["loss_scale"] for r in seen.metrics} == {1024.0 if dtype == "fp16" else 1.0}
    # The same run with the step's samples replaced by a NaN: refused by DeepSpeed itself, and equal from there on.
    other = dataclasses.replace(config, name=f"{dtype}-nan")
    nan = worlds.run(2, train, other, t, dataclasses.replace(spike, factor=math.nan), deepspeed=True)[0]
    assert nan.losses[bad + 1 :] == seen.losses[bad + 1 :]
    assert {r["loss_scale"] for r in nan.metrics} == {1024.0 if dtype == "fp16" else 1.0}


def test_fp16_overflow_stays_a_normal_skip(worlds: RankPool, tmp_path: Path) -> None:
    config = config_of(tmp_path, "fp16", dtype="fp16")
    config = dataclasses.replace(
        config, precision=dataclasses.replace(config.precision, initial_loss_scale=2.0**40, loss_scale_hysteresis=1)
    )
    seen = worlds.run(2, train, config, Topology(dp=2), None, fresh=True)[0]
    assert seen.metrics[0]["skipped"] and seen.metrics[-1]["skipped_total"] > 1
    assert not seen.anomalies and not seen.error and seen.metrics[-1]["anomalies_total"] == 0
    scales = [r["loss_scale"] for r in seen.metrics]
    assert scales[0] == 2.0**40 and scales[1] == 2.0**39


def test_own_kernels_refuse_on_the_device(worlds: RankPool, tmp_path: Path) -> None:
    """The own AdamW: a spike's update is vetoed without the host; the rest as with torch's, within rounding."""
    from megatron_port.ext.kernels.kernels import kernels_status

    if reason := kernels_status("cpu")[1]:
        pytest.skip(reason)
    bad = 4
    spike = Fault("head", sample_of(bad, 1, 1, 2), 1e3, dp=1)
    for kernels in ("on", "off"):
        config = config_of(tmp_path, kernels, own_kernels=kernels)
        seen = worlds.run(2, train, config, Topology(dp=2), spike, fresh=True)[0]
        assert [r["skipped"] for r in seen.metrics] == [i == bad for i in range(STEPS)]
        names(only(seen), step=bad, fault=spike, micro_batch=1)
        if kernels == "on":
            own = seen
    assert own.losses == pytest.approx(seen.losses, rel=1e-4)


# ---------------------------------------------------------------- rewind


def test_rewind_leaves_the_samples_out(worlds: RankPool, tmp_path: Path) -> None:
    """Back to the last checkpoint, and on as if the bad samples had never been in the order: equal to the bit."""
    t, bad = Topology(dp=2), 3
    fault = Fault("layers.0.mlp.up", sample_of(bad, 0, 1, 2), math.nan, dp=1)
    rewind = {"on_anomaly": "rewind"}
    cases = [
        (config_of(tmp_path, "reference", save_interval=2), t, None, (bad * BATCH,)),
        (config_of(tmp_path, "rewound", save_interval=2, numerics=rewind), t, fault, ()),
        (config_of(tmp_path, "again", save_interval=2, numerics=rewind), t, dataclasses.replace(fault, times=1), ()),
        (config_of(tmp_path, "clean", save_interval=2), t, None, ()),
        (config_of(tmp_path, "early", save_interval=4, numerics=rewind), t, fault, ()),
    ]
    results = worlds.run(2, train_all, cases, fresh=True, timeout=200)
    reference, rewound, again, clean, early = results[0]
    assert rewound.losses == reference.losses and len(rewound.losses) == STEPS
    assert [r["step"] for r in rewound.metrics] == list(range(1, STEPS + 1))
    assert rewound.metrics[-1]["samples"] == STEPS * BATCH and rewound.metrics[-1]["skipped_total"] == 0
    assert rewound.metrics[-1]["anomalies_total"] == 1
    assert only(rewound)["first_sample"] == bad * BATCH
    for rank in results:
        assert all(torch.equal(a, b) for a, b in zip(rank[0].weights.values(), rank[1].weights.values()))
    # What happens once is no fault of the samples: they are used when the step comes again.
    assert only(again)["verdict"] == "transient" and again.losses == clean.losses != reference.losses
    assert "no checkpoint to rewind to yet" in early.error


# ---------------------------------------------------------------- a bit in one replica


def flip_and_check(config: RunConfig, topology: Topology, victims: list[tuple[int, str]]) -> list[str]:
    """Flip one bit of the named parameter on each victim in turn; what the check says of each, and of none."""
    ctx = ParallelContext.create(topology, "cpu")
    trainer = Trainer(session_of(config, ctx))
    out = []
    check_replicas(trainer.state.engine, ctx, step=0)
    for rank, name in victims:
        # Where a rank has two slices of a name, the second is the one that it shares.
        p = next((p for r, p in reversed(list(trainer.state.engine.named_parameters())) if r.name == name), None)
        word = None if p is None else p.detach().view(-1).view(torch.int32 if p.element_size() == 4 else torch.int16)
        if ctx.rank == rank:
            assert word is not None
            word[7] ^= 1
        try:
            check_replicas(trainer.state.engine, ctx, step=12)
            out.append("")
        except NumericsError as error:
            out.append(str(error))
        if ctx.rank == rank:
            assert word is not None
            word[7] ^= 1
    check_replicas(trainer.state.engine, ctx, step=13)
    ctx.close()
    return out


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_flipped_bit_names_rank_and_tensor(worlds: RankPool, tmp_path: Path, dtype: str) -> None:
    """dp 3: the odd one out. dp 2 or tp 2: both, as two copies cannot say who is wrong."""
    host = socket.gethostname()
    config = dataclasses.replace(config_of(tmp_path, dtype, dtype=dtype))
    config = dataclasses.replace(
        config, batch=dataclasses.replace(config.batch, global_batch_size=6)
    )
    name = "layers.1.mlp.up.weight"
    said = worlds.run(3, flip_and_check, config, Topology(dp=3), [(r, name) for r in range(3)], fresh=True)
    assert said[0] == said[1] == said[2]
    for rank, text in enumerate(said[0]):
        assert f"after step 12 the copies of {name} differ over the dp group of ranks 0-2" in text
        assert f"rank {rank} on {host} holds other bits than the 2 that agree" in text
        assert text.startswith(f"rank {rank} on {host}")

    victims = [(3, name), (2, "layers.0.norm1.weight"), (1, "embedding.word.weight")]
    said = worlds.run(4, flip_and_check, config_of(tmp_path, f"{dtype}4", dtype=dtype, layout={
        "sequence_parallel": True}), Topology(tp=2, dp=2), victims, fresh=True)
    assert said[0] == said[1] == said[2] == said[3]
    split, norm, word = said[0]
    assert name in split and "dp group of ranks 1, 3" in split and "no majority" in split and "rank 3" in split
    assert "layers.0.norm1.weight" in norm and "rank 2" in norm and "no majority" in norm
    assert "embedding.word.weight" in word and "dp group of ranks 1, 3" in word
    if dtype == "fp32":  # two key/value heads on four tensor ranks
        grouped = dataclasses.replace(config, model=dataclasses.replace(config.model, num_query_groups=2))
        name = "layers.1.attention.qkv.weight"
        said = worlds.run(4, flip_and_check, grouped, Topology(tp=4, kv_copies=2), [(3, name)], fresh=True)
        assert f"copies of {name} differ over the kv_copies group of ranks 2-3" in said[0][0] and said[0] == said[3]


def test_the_loop_stops_on_drift(worlds: RankPool, tmp_path: Path) -> None:
    """A copy that drifts: exit 6, after the step, on every rank. (The state check would call it before the step.)"""
    with pytest.raises(RankFailed, match=r"copies of layers\.0\.norm1\.weight.* differ.*rank 1 on") as caught:
        worlds.run(3, train_with_drift, dataclasses.replace(
            config_of(tmp_path, "drift", numerics={"state_check_interval": 0}), batch=dataclasses.replace(
                config_of(tmp_path, "drift").batch, global_batch_size=6),
        ), Topology(dp=3), fresh=True)
    assert caught.value.error_type == "NumericsError"


def train_with_drift(config: RunConfig, topology: Topology) -> None:
    ctx = ParallelContext.create(topology, "cpu")
    trainer = Trainer(session_of(config, ctx))
    if ctx.rank == 1:
        p = next(p for r, p in trainer.state.engine.named_parameters() if r.name == "layers.0.norm1.weight")
        with torch.no_grad():
            p[3] = p[3] * (1 + 2.0**-20)
    trainer.run()
