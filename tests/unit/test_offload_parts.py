"""Offload on one real rank: bytes that move, races that are planted in the engine, checkpoints, disks that refuse."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_ranks
import pytest
import torch
from fake_ranks import batches, fake_rank
from stream_order import OrderChecker, StreamRace
from test_checkpoint_roundtrip import state

from megatron_port.core.checkpoint.writer import Peers
from megatron_port.core.config.checks import problems
from megatron_port.core.config.dump import to_toml
from megatron_port.core.config.features import OffloadConfig
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import (
    BackendConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_port.core.dist import device_streams
from megatron_port.core.dist.device_streams import HOST, observed_by
from megatron_port.core.engine.api import StepLimits
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import ConfigError, EnvironmentFault
from megatron_port.core.layers.providers import torch_providers
from megatron_port.ext.kernels import kernels
from megatron_port.ext.memory import offload as disk_state
from megatron_port.ext.memory.held import HeldParameters
from megatron_port.ext.memory.offload import Offload, StateFile, offloaded_numbers
from megatron_port.ext.memory.streams import COPY_IN, COPY_OUT
from megatron_port.ext.memory.swap import ALIGN, StagingRing
from megatron_port.ext.memory.zero3 import GatherGroup
from megatron_port.ext.storage import background
from megatron_port.ext.storage.background import BackgroundSave
from megatron_port.run import session
from megatron_port.run.weights import Weights, inference_config

DP = 2


def run(
    zero: int = 1, dtype: Any = "bf16", *, layout: dict[str, Any] | None = None, micro_batches: int = 2, **offload: Any
) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=97, seq_length=8,
                          tie_embeddings=False),
        layout=LayoutConfig(**{"data_parallel_size": DP, "zero_stage": zero, "reduce_bucket_size": 4000,
                               "vocab_padding_multiple": 8, **(layout or {})}),
        batch=BatchConfig(micro_batch_size=1, global_batch_size=DP * micro_batches),
        precision=PrecisionConfig(dtype=dtype), data=DataConfig(synthetic=True), engine="native",
        checkpoint=CheckpointConfig(asynchronous=False), offload=OffloadConfig(**offload),
    )


@contextmanager
def rank_of(config: RunConfig) -> Iterator[tuple[NativeEngine, list[Any]]]:
    """The engine of rank 0 on the own optimizer kernel, and its micro-batches."""
    kernels.load("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_ranks, "torch_providers", lambda: replace(torch_providers(), optimizer="own"))
        with fake_rank(config, 0, initialise=True) as (engine, ctx, resolved):
            assert isinstance(engine, NativeEngine)
            yield engine, batches(resolved, ctx)


def held(engine: NativeEngine) -> HeldParameters:
    assert isinstance(engine.sharded, HeldParameters)
    return engine.sharded


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(("zero", "dtype", "width"), [(1, "bf16", 2), (2, "fp32", 4), (3, "bf16", 2)])
def test_a_step_moves_a_gradient_and_a_weight_per_parameter(zero: int, dtype: str, width: int) -> None:
    with rank_of(run(zero, dtype, optimizer="cpu")) as (engine, mine):
        offload = held(engine).offload
        assert offload is not None
        elements = sum(b.plan.numel // b.shards for b in engine.sharded.buckets)
        for buffer in offload.ring._free:
            buffer.memory.fill_(255)  # NaN, which must not reach the padding between parameters
        for step in range(2):
            before = dict(offload.ring.moved)
            assert not engine.train_step(mine, step=step, lr=1e-3).skipped
            moved = {way: count - before[way] for way, count in offload.ring.moved.items()}
            assert moved == {COPY_OUT: 4 * elements, COPY_IN: width * elements}
        before = dict(offload.ring.moved)
        assert engine.train_step(mine, step=2, lr=1e-3, limits=StepLimits(loss=-1.0)).skipped
        skipped = offload.ring.moved[COPY_OUT] - before[COPY_OUT]
        assert skipped <= 4 * offload.ring.count * max(b.plan.numel // b.shards for b in engine.sharded.buckets)
        assert offload.ring.moved[COPY_IN] == before[COPY_IN] and offload.ring.free == offload.ring.count


def test_weights_on_the_host_are_copied_for_each_gather() -> None:
    with rank_of(run(3, optimizer="cpu", weights="cpu")) as (engine, mine):
        gather, offload = held(engine).unit_gather, held(engine).offload
        assert gather is not None and offload is not None
        engine.train_step(mine, step=0, lr=1e-3)
        sharded = engine.sharded.buckets
        layers = [b for b in sharded if 0 < b.plan.unit < 4]
        ends = sum(b.plan.numel for b in sharded) - sum(b.plan.numel for b in layers)
        # Two micro-batches, four passes, three turns at which two of three layers are still in the windows; embedding
        # and head share a window and alternate.
        whole = 4 * sum(b.plan.numel for b in layers) - 3 * 2 * sum(b.plan.numel for b in layers) // 3 + 2 * ends
        assert gather.copied == 2 * whole // DP
        assert offload.ring.moved[COPY_IN] == 0


def test_one_rank_trains_from_weights_on_the_host() -> None:
    """Nothing is gathered there, only copied; the numbers are those of whole weights on the device."""
    def trained(**offload: Any) -> tuple[list[float], list[Any]]:
        with rank_of(run(3, "fp32", layout={"data_parallel_size": 1}, **offload)) as (engine, mine):
            losses = [engine.train_step(mine, step=step, lr=1e-2).loss for step in range(3)]
            assert (held(engine).unit_gather is not None) == bool(offload)
            return losses, [(p.name, p.kind, p.tensor.tolist()) for p in engine.state_pieces()]

    plain = trained()
    assert trained(optimizer="cpu", weights="cpu") == plain and len(set(plain[0])) == 3


def test_what_lives_where_is_what_the_table_says(tmp_path: Path) -> None:
    for offload, host in ((CPU, 12), ({**NVME, "nvme_path": str(tmp_path)}, 0)):
        with rank_of(run(3, **offload)) as (engine, _):
            sharded, offloaded = engine.sharded.buckets, held(engine).offload
            assert isinstance(offloaded, Offload)
            elements = [b.plan.numel // b.shards for b in sharded]
            kept = sum(t.nbytes for b in sharded for t in (b.masters, *b.state.values()))
            files = sum(f.nbytes for f in offloaded.disk.files.values()) if offloaded.disk else 0
            assert kept == 12 * sum(elements)
            assert host == 12 or 0 <= files - kept <= 3 * ALIGN * len(sharded)
            room = (18 if host == 0 else 6) * max(elements)
            assert 0 <= offloaded.ring.nbytes - room <= 5 * ALIGN and offloaded.ring.count == 2


def test_a_fraction_is_of_the_elements_by_whole_buckets() -> None:
    assert offloaded_numbers([10, 10, 10, 10], 1.0) == [0, 1, 2, 3]
    assert offloaded_numbers([10, 10, 10, 10], 0.5) == [0, 1]
    assert offloaded_numbers([10, 10, 10, 10], 0.51) == [0, 1, 2]
    assert offloaded_numbers([10, 10], 0.001) == [0]


# ---------------------------------------------------------------- races


def two_steps(config: RunConfig) -> OrderChecker:
    """Two steps, and a look at the state, under the checker."""
    checker = OrderChecker()
    with rank_of(config) as (engine, mine), observed_by(checker):
        for step in range(2):
            engine.train_step(mine, step=step, lr=1e-3)
            assert list(engine.state_pieces())
    return checker


def snapshots(config: RunConfig, folder: Path) -> None:
    """A step, an asynchronous save, and the next steps and save."""
    with rank_of(config) as (engine, mine), observed_by(OrderChecker()):
        save = BackgroundSave(Peers(), folder)
        for step in range(1, 3):
            engine.train_step(mine, step=step, lr=1e-3)
            save.start(state(step), engine.state_pieces())
            save.finish()


CPU: dict[str, Any]
NVME: dict[str, Any]
CPU, NVME = {"optimizer": "cpu", "buffers": 2}, {"optimizer": "nvme", "buffers": 2}


def test_the_real_paths_have_no_race(tmp_path: Path) -> None:
    offloaded = two_steps(run(1, **CPU))
    assert {COPY_OUT, COPY_IN, HOST, "communicator"} <= set(offloaded.counted)
    assert "file job 1" in two_steps(run(2, **NVME, nvme_path=str(tmp_path))).counted
    two_steps(run(3, optimizer="cpu", weights="cpu"))
    two_steps(run(3))
    staged = two_steps(run(1, layout={"pipeline_parallel_size": 2}, **CPU))
    assert any("to or from" in stream for stream in staged.counted)


def forgets(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Leave a wait out."""
    return lambda patch: patch.setattr(owner, name, lambda *arguments: None)


def work_that_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device_streams._ObservedWork, "wait", lambda work: work._work.wait())


PLANTED: dict[str, tuple[RunConfig, Callable[[pytest.MonkeyPatch], None], str]] = {
    "the update begins before its gradient has come":
        (run(1, **CPU), forgets(StagingRing, "wait_host"), "update .* after copy to the host"),
    "weights are gathered before they are published":
        (run(1, **CPU), forgets(StagingRing, "wait_target"), "weight gather .* after copy to the device"),
    "sums are cleared while they are copied to the host":
        (run(1, **CPU), lambda patch: (forgets(StagingRing, "wait_source")(patch),
                                       forgets(StagingRing, "wait_host")(patch))[0], "after copy to the host"),
    "state is read while it is written to the disk":
        (run(1, **NVME, nvme_path="."), forgets(StagingRing, "drain"), "the state is read .* after state is written"),
    "the update begins before its state has come from the disk":
        (run(1, **NVME, nvme_path="."), forgets(StagingRing, "wait_io"), "after state is read from its files"),
    "gradients are used before they are reduced":
        (run(1), work_that_is_not_waited_for, "added up .* after gradient reduction"),
    "a unit runs before its weights are gathered":
        (run(3), forgets(GatherGroup, "wait"), "a unit's pass .* after weight gather"),
    "activations are used before they have come":
        (run(1, layout={"pipeline_parallel_size": 2, "data_parallel_size": 1, "pipeline_schedule": "gpipe"}),
         work_that_is_not_waited_for, "what arrived is used .* after transfer between stages"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plant, message = PLANTED[name]
    monkeypatch.chdir(tmp_path)
    plant(monkeypatch)
    with pytest.raises(StreamRace, match=message):
        two_steps(config)


def test_a_snapshot_is_read_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots(run(1), tmp_path / "whole")
    monkeypatch.setattr(background, "host_waits_for", lambda stream: None)
    with pytest.raises(StreamRace, match="a snapshot is written to its file .* after snapshot"):
        snapshots(run(1), tmp_path / "early")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(("change", "message"), [
    ({"engine": "deepspeed"}, 'use engine = "native"'),
    ({"layout": {"zero_stage": 0}}, "use zero_stage 1, 2 or 3"),
    ({"precision": PrecisionConfig(dtype="fp64")}, "use fp32, bf16 or fp16"),
    ({"optimizer": OptimizerConfig(name="muon")}, "needs whole matrices or sums over them"),
    ({"offload": OffloadConfig(optimizer="cpu", weights="cpu")}, "use zero_stage 3"),
    ({"offload": OffloadConfig(weights="cpu")}, 'set offload.optimizer = "cpu"'),
    ({"offload": OffloadConfig(fraction=0.5)}, "which offloads nothing"),
    ({"offload": OffloadConfig(optimizer="nvme")}, "set it to a folder on a local disk"),
    ({"offload": OffloadConfig(optimizer="cpu", nvme_path="/x")}, "which writes no files"),
    ({"offload": OffloadConfig(optimizer="nvme", nvme_path="/x"), "checkpoint": CheckpointConfig()},
     "set checkpoint.asynchronous = false"),
    ({"offload": OffloadConfig(optimizer="cpu", weights="cpu", fraction=0.5), "layout": {"zero_stage": 3}},
     "use fraction = 1"),
    ({"backend": BackendConfig(optimizer="torch")}, 'backend.optimizer "torch": the host updates by the own AdamW'),
    ({"backend": BackendConfig(own_kernels="off")}, 'backend.own_kernels "off": the host updates by the own AdamW'),
])
def test_what_contradicts_offload_is_named(change: dict[str, Any], message: str) -> None:
    config = run(optimizer="cpu")
    assert not problems(config)
    if isinstance(change.get("layout"), dict):
        change = {**change, "layout": replace(config.layout, **change["layout"])}
    found = problems(replace(config, **change))
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize(("name", "device", "lacking", "refused"), [
    ("adamw", "cpu", "cpu", True), ("adamw", "cuda", "cuda", True), ("adamw", "cuda", "cpu", True),
    ("lion", "cuda", "cpu", True), ("lion", "cuda", "cuda", False), ("lion", "cpu", "cpu", False),
    ("adamw-8bit", "cpu", "cpu", False), ("adamw", "cpu", "cuda", False),
])
def test_kernels_that_offload_needs_are_looked_for_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str, lacking: str, refused: bool
) -> None:
    monkeypatch.setattr(session, "kernels_status", lambda kind: ("", "not built" if kind == lacking else ""))
    config = replace(run(optimizer="cpu"), optimizer=OptimizerConfig(name=name))
    here: Any = SimpleNamespace(kind=device)
    with pytest.raises(EnvironmentFault, match="not built") if refused else nullcontext():
        session._refuse(config, here)


def test_a_run_with_offload_can_be_read_for_inference(tmp_path: Path) -> None:
    """On one process without ZeRO, where nothing is offloaded."""
    config = run(3, optimizer="nvme", nvme_path="/x", weights="cpu")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    weights = Weights(tmp_path, config.model, None, path, "", None, lambda: None)  # type: ignore[arg-type]
    found = inference_config(weights, ["data.synthetic=true"], 1)
    assert found.offload == OffloadConfig() and not problems(found, world_size=1)


def test_how_training_exchanged_rows_and_keys_does_not_bind_inference(tmp_path: Path) -> None:
    """Not its pairs, which need sequence parallelism, nor its ring, whose attention may take no sinks elsewhere."""
    config = with_values(run(), {
        "layout.tensor_parallel_size": 2, "layout.context_parallel_size": 2, "layout.sequence_parallel": True,
        "layout.tp_exchange": "pairs", "layout.cp_method": "ring"})
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    weights = Weights(tmp_path, config.model, None, path, "", None, lambda: None)  # type: ignore[arg-type]
    for size in (1, 2):
        sizes = [f"layout.{axis}_parallel_size={size}" for axis in ("tensor", "context")]
        found = inference_config(weights, ["data.synthetic=true", *sizes], size * size)
        assert not problems(found, world_size=size * size)
        assert (found.layout.tp_exchange, found.layout.cp_method) == ("collective", "gather")


def test_another_optimizer_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match='"torch" here; build the kernels'), fake_rank(run(optimizer="cpu"), 0):
        pass


def test_a_disk_that_is_too_small_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_state.os, "posix_fallocate", full)  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentFault, match=r"no \d+ bytes for master: No space left.*lower offload.fraction"):
        StateFile(tmp_path, ALIGN, "master")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_names_what_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_of(run(**NVME, nvme_path=str(tmp_path))) as (engine, mine):
        engine.train_step(mine, step=0, lr=1e-3)

        def broken(*arguments: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(disk_state.os, "pwritev", broken)  # type: ignore[attr-defined]
        with pytest.raises(EnvironmentFault, match=r"could not be written.*last checkpoint is whole"):
            engine.train_step(mine, step=1, lr=1e-3)
            list(engine.state_pieces())


def test_a_slow_disk_slows_the_update_and_fills_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, under_way, most = StateFile.write, [], [0]

    def slow(file: StateFile, offset: int, memory: torch.Tensor) -> None:
        under_way.append(offset)
        most[0] = max(most[0], len(under_way))
        time.sleep(0.003)
        write(file, offset, memory)
        under_way.pop()

    with rank_of(run(optimizer="cpu")) as (engine, mine):
        plain = [engine.train_step(mine, step=step, lr=1e-3).loss for step in range(3)]
    monkeypatch.setattr(StateFile, "write", slow)
    with rank_of(run(**NVME, nvme_path=str(tmp_path))) as (engine, mine):
        assert [engine.train_step(mine, step=step, lr=1e-3).loss for step in range(3)] == plain
        assert 1 <= most[0] <= 2 < len(engine.sharded.buckets)


def test_a_bit_that_flips_on_the_disk_is_found(tmp_path: Path) -> None:
    with rank_of(run(**NVME, nvme_path=str(tmp_path))) as (engine, mine):
        engine.train_step(mine, step=0, lr=1e-3)
        assert engine.state_damage(now=True) is None
        piece = next(p for p in engine.sharded.pieces if p.master.numel() > 7)
        piece.state["exp_avg"].view(torch.int32)[7] ^= 1 << 20
        damage = engine.state_damage(now=True)
        assert f"exp_avg of {piece.record.name} (element {piece.start + 7}, bit 20)" in str(damage)


def test_files_have_no_name_and_keep_what_is_written(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "new", 2 * ALIGN, "master")
    assert not list((tmp_path / "new").iterdir())
    memory = StagingRing(torch.device("cpu"), count=1, nbytes=ALIGN).acquire().memory
    memory.view(torch.float32).copy_(torch.arange(ALIGN // 4))
    file.write(ALIGN, memory)
    view = file.mapped(ALIGN, ALIGN // 4)
    assert torch.equal(view, torch.arange(ALIGN // 4).float())
    view += 1.0
    file.flush()
    memory.zero_()
    file.read(ALIGN, memory)
    assert torch.equal(memory.view(torch.float32), torch.arange(ALIGN // 4) + 1.0)
    assert not file.mapped(0, ALIGN // 4).any()
