"""Captured steps: a replay does what the step would have done, and what cannot be captured is refused by name."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contradictions import contradictions
from step_tape import TapeCapturer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_port.core.config.features import OffloadConfig
from megatron_port.core.config.schema import (
    ActivationsConfig,
    BackendConfig,
    BatchConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    SparsityConfig,
    TrainingConfig,
)
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import initial_reader
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.shapes import parameter_shapes
from megatron_port.core.registry import MIXERS, PROVIDERS
from megatron_port.ext.context.division import ChunkDivision
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.ext.kernels.settings import GRAPHS as CONFLICTS
from megatron_port.ext.kernels.settings import why_not_captured
from megatron_port.ext.kernels.step_graphs import WARM_UP, CapturedGraph, CudaGraphCapturer
from megatron_port.ext.kernels.step_inputs import FIELDS, StepInputs, shapes_of, tensors_of
from megatron_port.ext.weights.readers import SparseWeights
from megatron_port.run.build import DTYPES, build_engine
from megatron_port.run.device import choose_device
from megatron_port.tools.bench import calibration
from megatron_port.tools.parity import recording

MODEL = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=61, seq_length=16, hidden_dropout=0.1,
    attention_dropout=0.1,
)
STEPS = 14
DENSE = SparsityConfig()


def engine_of(dtype: Any, *, scale: float = 2.0**20, sparsity: SparsityConfig = DENSE) -> NativeEngine:
    config = RunConfig(
        engine="native", model=MODEL, batch=BatchConfig(micro_batch_size=2, global_batch_size=4),
        # fp16 overflows in the first steps, so that the scale, and skipped updates, differ from step to step.
        precision=PrecisionConfig(
            dtype=dtype, initial_loss_scale=scale, loss_scale_hysteresis=1, loss_scale_window=2
        ),
        sparsity=sparsity,
        backend=BackendConfig(device="cpu", own_kernels="on"), optimizer=OptimizerConfig(clip_grad=0.5),
    )
    providers = choose_providers(
        config.backend, choose_device("cpu"), DTYPES[dtype], engine="native", attention_dropout=0.1
    )
    engine = build_engine(config, ParallelContext.single(), providers)
    assert isinstance(engine, NativeEngine)
    return engine


def batches_of(step: int, *, masked: bool = True, count: int = 2) -> list[MicroBatch]:
    """Micro-batches whose masks count another number of tokens in each step, with other documents."""
    size = 2 * count
    tokens = torch.randint(0, 61, (size, 17), generator=torch.Generator().manual_seed(step))
    mask = (tokens % (3 + step % 4) > 0).float()[:, 1:]
    starts = torch.where(tokens[:, :-1] % 5 == 0, torch.arange(16), 0).cummax(1).values.to(torch.int32)
    return [
        MicroBatch((size * step + i, size * step + i + 1), tokens=tokens[i : i + 2, :-1], labels=tokens[i : i + 2, 1:],
                   loss_mask=mask[i : i + 2] if masked else None, document_starts=starts[i : i + 2])
        for i in range(0, size, 2)
    ]


def train(engine: NativeEngine) -> list[Any]:
    """All that a loop sees of a run, and the weights at its end."""
    out: list[Any] = []
    for step in range(STEPS):
        found = engine.train_step(batches_of(step, masked=step != 8), step=step, lr=1e-2 * (step + 1) / STEPS)
        losses = [float(loss) for loss in engine.micro_batch_losses()]
        out.append((found, losses, engine.nonfinite_gradients(), engine.state_damage()))
        if step == 6:
            out.append(engine.eval_step(batches_of(99)))
    return [*out, engine.scalar_state(), [p.tolist() for _, p in engine.named_parameters()]]


def test_replayed_steps_are_the_steps() -> None:
    """With dropout, masks, loss scale, skipped updates, learning rate, an evaluation and a step of another shape."""
    plain, captured, capturer = engine_of("fp16"), engine_of("fp16"), TapeCapturer()
    captured.capture_steps(capturer)
    want = train(plain)
    assert train(captured) == want
    # First micro-batch, others, what follows, update: before the evaluation, after it, after the step without masks.
    assert capturer.captured == 3 * 4
    assert captured.captured is not None and captured.captured.graphs.replays
    skipped = [one[0].skipped for one in want if isinstance(one, tuple)]
    assert any(skipped[:3]) and not all(skipped)


def losses_and_weights(counts: Sequence[int], capturer: TapeCapturer | None = None) -> list[Any]:
    """Train with these numbers of micro-batches in the steps, and other ways of dropping elements in each."""
    engine = engine_of("fp32")
    if capturer is not None:
        engine.capture_steps(capturer)
    out: list[Any] = []
    for step, count in enumerate(counts):
        found = engine.train_step(batches_of(step, count=count), step=step, lr=1e-2)
        out.append((found, [float(loss) for loss in engine.micro_batch_losses()]))
    assert engine.captured is None or engine.captured.graphs.replays
    return [*out, [p.tolist() for _, p in engine.named_parameters()]]


def test_graphs_do_not_grow_with_the_micro_batches() -> None:
    """And a step with another number of the same ones, as of a ramp-up, replays what was captured."""
    nodes = []
    for counts in ([2] * 6, [5] * 6, [2, 2, 2, 2, 3, 7, 1, 4]):
        capturer = TapeCapturer()
        assert losses_and_weights(counts, capturer) == losses_and_weights(counts)
        nodes.append(capturer.nodes)
    assert nodes[0] == nodes[1] == nodes[2] and len(nodes[0]) == 4


def test_micro_batches_of_several_shapes_are_one_graph() -> None:
    """As those whose labels are not all masked."""
    def trained(capturer: TapeCapturer | None) -> list[Any]:
        engine = engine_of("fp32")
        if capturer is not None:
            engine.capture_steps(capturer)
        for step in range(WARM_UP + 3):
            mixed = [batches_of(step)[0], batches_of(step, masked=False)[1]]
            engine.train_step(mixed, step=step, lr=1e-2)
        return [p.tolist() for _, p in engine.named_parameters()]

    assert trained(capturer := TapeCapturer()) == trained(None)
    assert capturer.captured == 2


def test_an_update_is_not_captured_before_the_passes() -> None:
    """Where fp16 overflows in the first step that could be captured, the passes' results have no lasting addresses."""
    plain, captured, capturer = engine_of("fp16", scale=2.0**24), engine_of("fp16", scale=2.0**24), TapeCapturer()
    captured.capture_steps(capturer)
    want = train(plain)
    assert train(captured) == want
    skipped = [one[0].skipped for one in want if isinstance(one, tuple)]
    assert skipped[WARM_UP] and not all(skipped)


def test_replays_have_the_masks_of_the_weights_that_were_loaded_last() -> None:
    """A run that returns to a checkpoint loads weights between replays."""
    def trained(*, captures: bool) -> list[Any]:
        engine = engine_of("fp32", sparsity=SparsityConfig(method="magnitude", ratio=0.5))
        if captures:
            engine.capture_steps(TapeCapturer())
        for step in range(WARM_UP + 4):
            if step == WARM_UP + 2:
                assert engine.captured is None or engine.captured.graphs.replays
                other = initial_reader({r.name: r for r, _ in engine.parameters}, 7, torch.device("cpu"))
                engine.load_weights(SparseWeights(engine.config.sparsity, parameter_shapes(MODEL), other))
            engine.train_step(batches_of(step), step=step, lr=1e-3)
        return [p.tolist() for _, p in engine.named_parameters()]

    assert trained(captures=True) == trained(captures=False)


class FalseCapturer(TapeCapturer):
    """Replays what was captured but for one launch, which got lost: what it makes is never written."""

    def __init__(self, lost: str) -> None:
        super().__init__()
        self.lost = lost

    def capture(self, function: Callable[[], Any]) -> CapturedGraph[Any]:
        graph = super().capture(function)
        calls = graph.replay.__self__.calls  # type: ignore[attr-defined]  # those of the tape
        for lost in [call for call in calls if str(call[0]) == self.lost][-1:]:  # an update has none
            calls[:] = [call for call in calls if call is not lost]
            for made in filter(torch.is_tensor, tree_leaves(lost[3])):
                made.zero_()
        return graph


@pytest.mark.parametrize(("lost", "named"), [
    ("aten.embedding.default", "loss"), ("megatron_port.add_rows_.default", "gradient norm"),
])
def test_a_wrong_replay_is_found_said_and_not_used(lost: str, named: str, capsys: Any) -> None:
    """The run goes on as if nothing had been captured."""
    plain, captured = engine_of("fp16"), engine_of("fp16")
    capturer = FalseCapturer(lost)
    captured.capture_steps(capturer)
    assert train(captured) == train(plain)
    assert capturer.captured == 3
    said = capsys.readouterr().out
    assert said.count("warning: the replay of a captured step has") == 1 and named in said


def test_state_that_changed_between_replays_is_found() -> None:
    engine = engine_of("fp32")
    engine.capture_steps(TapeCapturer())
    for step in range(WARM_UP + 3):
        if step == WARM_UP + 2:
            engine.sharded.pieces[3].master[0] += 1.0
        engine.train_step(batches_of(step), step=step, lr=1e-3)
        assert (engine.state_damage() is not None) == (step == WARM_UP + 2)
    # NCCL waits for graphs that use a communicator, so they must go with the engine, without a garbage collection.
    assert engine.captured is not None
    alive = weakref.ref(engine.captured.graphs)
    del engine
    assert alive() is None


def test_every_stage_sees_that_masks_come_and_go() -> None:
    """Else the last stage alone would capture anew, and run passes that the others do not."""
    first = [dataclasses.replace(b, labels=None, loss_mask=None) for b in batches_of(0)]
    assert shapes_of(first) != shapes_of([dataclasses.replace(b, labels_masked=True) for b in first])


def test_inputs_lie_where_they_lay() -> None:
    def pairs_of(step: int) -> list[MicroBatch]:
        drawn = torch.Generator().manual_seed(step)
        return [dataclasses.replace(b, side={
            "reference": torch.rand(len(b.sample_ids), 2, generator=drawn, dtype=torch.float64)
        }) for b in batches_of(step)]

    inputs = StepInputs(pairs_of(0), torch.device("cpu"))

    def places() -> list[int]:
        return [tensor.data_ptr() for b in inputs.batches for tensor in tensors_of(b).values()]

    where = places()
    for step in (1, 2):
        batches = pairs_of(step)
        inputs.load(batches, [torch.tensor(pair) for pair in ((step, -1), (-step, 1 << 62))])
        for mine, given in zip(inputs.batches, batches):
            wanted = tensors_of(given)
            assert list(wanted) == ["tokens", "labels", "loss_mask", "document_starts", "reference"]
            for name, tensor in tensors_of(mine).items():
                assert torch.equal(tensor, wanted[name]), name
        assert [k.tolist() for k in inputs.keys] == [[step, -1], [-step, 1 << 62]]
    assert where == places()


class Writes(TorchDispatchMode):
    """Refuses what no device does with another's memory; ``ranges``: elements written, by (first, number)."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: dict[torch.dtype, list[tuple[int, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        target = args[0] if func is torch.ops.aten.copy_.default else kwargs.get("out")
        if func is not torch.ops.aten.copy_.default:
            assert len({t.device for t in tensors}) < 2, f"{func} of tensors on several devices"
        if target is not None and target.is_meta:
            self.ranges.setdefault(target.dtype, []).append((target.storage_offset(), target.numel()))
        return func(*args, **kwargs)


def test_inputs_come_from_the_host_or_from_the_device() -> None:
    """A caller's micro-batches may be on the device, while the keys of their samples never are."""
    device = torch.device("meta")  # has no values; what is written where is seen
    there = [dataclasses.replace(b, **{n: getattr(b, n).to(device) for n in FIELDS}) for b in batches_of(0)]
    inputs = StepInputs(batches_of(0), device)
    memory = {tensor.dtype: tensor.untyped_storage().nbytes() // tensor.element_size()
              for b in inputs.batches for tensor in (getattr(b, name) for name in FIELDS)}
    for given, calls in ((batches_of(1), 3), (there, 4)):
        with Writes() as writes:
            inputs.load(given, [torch.tensor(pair) for pair in ((1, 2), (3, 4))])
        assert sum(map(len, writes.ranges.values())) == calls
        for dtype, ranges in writes.ranges.items():
            ends = [at + count for at, count in sorted(ranges)]
            assert [0, *ends[:-1]] == [at for at, _ in sorted(ranges)] and ends[-1] == memory[dtype]


def test_another_division_is_another_graphs() -> None:
    """A graph has the positions of the micro-batch that it was captured with, whatever the tensors hold later."""
    first, second, same = (ChunkDivision(4, ranks) for ranks in (((0, 3), (1, 2)), ((0, 1), (2, 3)), ((0, 3), (1, 2))))
    given = batches_of(0)
    divided = [[dataclasses.replace(b, division=d) for b, d in zip(given, pair, strict=True)]
               for pair in ((first, first), (first, second), (same, same))]
    assert shapes_of(divided[0]) not in (shapes_of(given), shapes_of(divided[1]))
    assert shapes_of(divided[0]) == shapes_of(divided[2])
    inputs = StepInputs(divided[1], torch.device("cpu"))
    assert [b.division for b in inputs.batches] == [first, second]


RECORDED = RunConfig(engine="native", backend=BackendConfig(graphs="step", device="cuda"))
DIVIDED = {
    "backend": BackendConfig(graphs="step", device="cuda", attention="math"),
    "data": DataConfig(attention_documents="within"),
    "layout": LayoutConfig(context_parallel_size=2, cp_order="balanced"),
}
"""Each micro-batch has a division of its own, whatever the kernels take."""


@pytest.mark.parametrize(("change", "named"), [
    ({"engine": "deepspeed"}, 'engine "deepspeed"'),
    ({"backend": BackendConfig(graphs="step", device="cpu")}, 'backend.device "cpu"'),
    ({"backend": BackendConfig(graphs="step", share_devices=True)}, "backend.share_devices"),
    ({"backend": BackendConfig(graphs="step", optimizer="torch")}, 'backend.optimizer "torch"'),
    ({"layout": LayoutConfig(zero_stage=3)}, "layout.zero_stage 3"),
    ({"offload": OffloadConfig(optimizer="cpu")}, 'offload.optimizer "cpu"'),
    ({"activations": ActivationsConfig(policy="plan")}, 'activations.policy "plan"'),
    ({"activations": ActivationsConfig(policy="plan", layers=("core:swap", ""))}, "activations.layers with :swap"),
    ({"optimizer": OptimizerConfig(name="lion")}, 'optimizer.name "lion"'),
    ({"precision": PrecisionConfig(dtype="fp64")}, "fp64"),
    ({"batch": BatchConfig(rampup_start=2), "layout": LayoutConfig(zero_stage=2)}, "batch.rampup_start 2"),
    ({"batch": BatchConfig(rampup_start=2), "layout": LayoutConfig(pipeline_parallel_size=2)}, "batch.rampup_start 2"),
    ({"numerics": NumericsConfig(replay_interval=3)}, "numerics.replay_interval 3"),
    (DIVIDED, 'layout.cp_order "balanced"'),
    ({"data": DataConfig(attention_documents="within")}, 'data.attention_documents "within" and backend.attention'),
])
def test_what_cannot_be_captured_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    assert not contradictions(CONFLICTS, RECORDED)
    assert not contradictions(CONFLICTS, dataclasses.replace(RECORDED, batch=BatchConfig(rampup_start=2)))
    (problem,) = contradictions(CONFLICTS, dataclasses.replace(RECORDED, **change))
    assert problem.startswith('backend.graphs "step" with ') and named in problem


def test_a_device_without_launches_is_refused() -> None:
    config = dataclasses.replace(engine_of("fp32").config, backend=BackendConfig(graphs="step"))
    providers = choose_providers(BackendConfig(device="cpu"), choose_device("cpu"), torch.float32, engine="native")
    with pytest.raises(ConfigError, match="the run is on cpu"):
        build_engine(config, ParallelContext.single(), providers)


@pytest.mark.parametrize(("change", "named"), [
    ({}, ""),
    ({"backend": BackendConfig(graphs="off")}, 'backend.graphs "off"'),
    ({"backend": BackendConfig(graphs="step"), "layout": LayoutConfig(zero_stage=3)}, ""),  # which checks refuse
    ({"layout": LayoutConfig(zero_stage=3)}, "layout.zero_stage 3"),
    ({"optimizer": OptimizerConfig(name="lion")}, 'optimizer.name "lion"'),
    ({"training": TrainingConfig(hooks=("theirs",))}, "training.hooks"),
    (DIVIDED | {"backend": BackendConfig(attention="math")}, 'layout.cp_order "balanced"'),
    (DIVIDED | {"backend": BackendConfig(attention="math"), "layout": LayoutConfig(
        context_parallel_size=2, cp_order="zigzag")}, ""),
])
def test_steps_are_captured_where_nothing_refuses_them(change: dict[str, Any], named: str) -> None:
    config = dataclasses.replace(RunConfig(), **change)  # of which other checks have something to say
    why = why_not_captured(config, amd=False, optimizer="own")
    assert (named in why) if named else not why
    assert "AMD" in why_not_captured(RunConfig(), amd=True, optimizer="own")
    assert "apex" in why_not_captured(RunConfig(), amd=False, optimizer="apex")


def test_a_plugin_asks_for_captured_steps_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(MIXERS), "added", property(lambda self: ("delta",) if self is MIXERS else ()))
    assert "plugin" in why_not_captured(RunConfig(), amd=False, optimizer="own")


def test_a_plugins_provider_of_an_op_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = PROVIDERS["norm"]
    monkeypatch.setattr(type(norm), "added", property(lambda self: ("theirs",) if self is norm else ()))
    assert not why_not_captured(RunConfig(), amd=False, optimizer="own")  # auto takes none of a plugin's
    asked = RunConfig(backend=BackendConfig(norm="theirs"))
    assert "plugin" in why_not_captured(asked, amd=False, optimizer="own")


def test_a_lost_peer_is_no_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **settings: nullcontext())
    capturer = object.__new__(CudaGraphCapturer)  # a real one needs a GPU
    capturer._pool = capturer._stream = None  # type: ignore[assignment]

    def fails(error: Exception) -> None:
        raise error

    with pytest.raises(dist.DistBackendError, match="aborted"):
        capturer.capture(lambda: fails(dist.DistBackendError("NCCL communicator was aborted")))
    with pytest.raises(ConfigError, match=r'\(not permitted\); use backend.graphs = "off"'):
        capturer.capture(lambda: fails(RuntimeError("not permitted\nmore")))


def test_tools_that_measure_or_change_the_hosts_work_capture_nothing() -> None:
    asked = RunConfig(backend=BackendConfig(graphs="step", device="cpu"))
    assert calibration._config(asked, 1, 32, "fp32").backend.graphs == "off"
    assert recording._called(asked).backend.graphs == "off"
