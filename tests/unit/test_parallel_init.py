"""Initial weights: the same bits in every layout, the right spread, bounded memory."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contexts import slice_record
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from megatron_port.core.config.schema import LayoutConfig, ModelConfig
from megatron_port.core.dist import record as init
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import InitSpec, ParameterRecord, initial_reader, initial_values, record_of
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.embedding import padded_vocab_size
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder import GPTStage, build_chunks
from megatron_port.core.pipeline.partition import balanced_layers

NORMAL = InitSpec("normal", 0.02)


def draw(record: ParameterRecord, seed: int = 1) -> torch.Tensor:
    return initial_values(
        seed=seed, name=record.name, init=record.init, shape=record.shape, offset=record.offset, extent=record.extent
    )


def whole(shape: tuple[int, ...], name: str = "w", seed: int = 1, spec: InitSpec = NORMAL) -> torch.Tensor:
    return initial_values(seed=seed, name=name, init=spec, shape=shape, offset=(0,) * len(shape), extent=shape)


def box_of(shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]) -> torch.Tensor:
    return initial_values(seed=1, name="w", init=NORMAL, shape=shape, offset=offset, extent=extent)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_any_box_is_a_slice_of_the_whole(shape: tuple[int, ...]) -> None:
    """Every box there is, empty ones too: drawn ones seldom start inside a dimension after the first."""
    values = whole(shape)
    spans = [[(o, n) for o in range(size + 1) for n in range(size - o + 1)] for size in shape]
    for box in itertools.product(*spans):
        offset, extent = (tuple(x) for x in zip(*box))
        assert torch.equal(box_of(shape, offset, extent), values[tuple(slice(o, o + n) for o, n in box)]), box


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_boxes_of_any_shape(shape: list[int], data: st.DataObject) -> None:
    offset = [data.draw(st.integers(0, n - 1)) for n in shape]
    extent = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset)]
    box = tuple(slice(o, o + n) for o, n in zip(offset, extent))
    assert torch.equal(box_of(tuple(shape), tuple(offset), tuple(extent)), whole(tuple(shape))[box])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("shape", "split_dim"), [((24, 10), 0), ((10, 24), 1), ((2, 12, 5), 1), ((24,), 0)])
def test_slices_put_together_are_the_single_process(tp: int, shape: tuple[int, ...], split_dim: int) -> None:
    """Column, row, packed [2, ffn, h] and bias-shaped parameters."""
    parts = [
        draw(slice_record("w", shape, init=NORMAL, decay=True, split_dim=split_dim, tp_rank=r, tp_size=tp))
        for r in range(tp)
    ]
    assert torch.equal(torch.cat(parts, split_dim), whole(shape))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("vocab", "multiple"), [(53, 1), (53, 8), (5, 8), (7, 128)])
def test_vocabulary_padding_is_never_drawn(tp: int, vocab: int, multiple: int) -> None:
    padded = padded_vocab_size(vocab, tp=tp, multiple=multiple)
    records = [
        slice_record("w", (vocab, 6), init=NORMAL, decay=True, split_dim=0, tp_rank=r, tp_size=tp, padded=padded)
        for r in range(tp)
    ]
    assert [draw(r).shape[0] for r in records] == [r.extent[0] for r in records]
    assert torch.equal(torch.cat([draw(r) for r in records]), whole((vocab, 6)))
    assert sum(r.local_shape[0] for r in records) == padded


MODELS = [
    ModelConfig(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=53, seq_length=16),
    ModelConfig(
        num_layers=4, hidden_size=32, num_attention_heads=8, num_query_groups=4, vocab_size=51, seq_length=16,
        position_embedding="rope", normalization="rmsnorm", activation="swiglu", ffn_hidden_size=24, add_bias=False,
        tie_embeddings=False,
    ),
]


def stage_of(model: ModelConfig, topology: Topology, rank: int, *, sp: bool = False) -> GPTStage:
    """A rank's stage without processes (its groups are None: it is never run)."""
    ctx = ParallelContext(topology, rank, torch.device("cpu"), topology.coordinates(rank))
    layout = LayoutConfig(
        tensor_parallel_size=topology.tp, pipeline_parallel_size=topology.pp, sequence_parallel=sp,
        vocab_padding_multiple=8,
    )
    build = BuildContext(
        model=model, layout=layout, ctx=ctx, providers=torch_providers(),
        step=StepSlot(DropoutStream(0, torch.device("cpu"))), dtype=torch.float32,
    )
    (stage,) = build_chunks(build, balanced_layers([0.0, *[1.0] * model.num_layers, 0.0], topology.pp))
    return stage


def weights(stage: GPTStage, seed: int) -> list[tuple[ParameterRecord, torch.Tensor]]:
    records = [record_of(p) for p in stage.parameters()]
    read = initial_reader({r.name: r for r in records}, seed)
    return [(r, read(r.name, "weight", r.offset, r.extent)) for r in records]


@pytest.mark.parametrize(("model", "topology"), [
    *itertools.product(MODELS, [Topology(tp=2), Topology(tp=4), Topology(pp=3), Topology(tp=2, pp=2, dp=2)]),
    (MODELS[1], Topology(tp=8, kv_copies=2)),
], ids=lambda x: str(x) if isinstance(x, Topology) else x.activation)
def test_every_layout_of_a_model_starts_from_the_same_bits(model: ModelConfig, topology: Topology) -> None:
    single = {r.name: values for r, values in weights(stage_of(model, Topology(), 0), 7)}
    seen: dict[str, torch.Tensor] = {name: torch.zeros_like(values) for name, values in single.items()}
    for rank in range(topology.world_size):
        for record, values in weights(stage_of(model, topology, rank), 7):
            assert torch.equal(values, single[record.name][record.box()]), record.name
            seen[record.name][record.box()] += 1
    assert all(bool((count >= 1).all()) for count in seen.values())


def test_seed_and_name_decide() -> None:
    base = whole((64, 64))
    assert not torch.equal(base, whole((64, 64), seed=2))
    assert not torch.equal(base, whole((64, 64), name="v"))
    for other in (whole((64, 64), seed=2), whole((64, 64), name="v")):
        correlation = float((base * other).mean()) / 0.02**2
        assert abs(correlation) < 5 / 64


def test_kinds() -> None:
    assert torch.equal(whole((3, 2), spec=InitSpec("ones")), torch.ones(3, 2))
    assert torch.equal(whole((3, 2), spec=InitSpec("zeros")), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="w: unknown initialisation 'xavier'"):
        whole((3, 2), spec=InitSpec("xavier"))


@pytest.mark.parametrize("std", [0.02, 0.006, 1.0])
def test_standard_deviation(std: float) -> None:
    w = whole((512, 256), spec=InitSpec("normal", std)).double()
    n = w.numel()
    assert w.dtype == torch.float64 and abs(float(w.std()) / std - 1) < 5 / math.sqrt(2 * n)
    assert abs(float(w.mean())) < 5 * std / math.sqrt(n)
    # Rows and columns too: an index mistake repeats or correlates them.
    assert float((w.std(0) / std - 1).abs().max()) < 6 / math.sqrt(2 * 512)
    assert float((w.std(1) / std - 1).abs().max()) < 6 / math.sqrt(2 * 256)
    gram = (w @ w.T) / (256 * std**2)
    assert float((gram - torch.diag(gram.diag())).abs().max()) < 6.5 / math.sqrt(256)


def test_output_layers_start_smaller() -> None:
    """GPT-2's 1 / sqrt(2 L) for the two projections into the residual stream, and nothing else."""
    model = MODELS[0]
    for record in (record_of(p) for p in stage_of(model, Topology(), 0).parameters()):
        if record.init.kind != "normal":
            continue
        into_residual = record.name.endswith(("attention.output.weight", "mlp.down.weight"))
        want = model.init_std / math.sqrt(2 * model.num_layers) if into_residual else model.init_std
        assert record.init.std == pytest.approx(want), record.name


def test_moments_read_as_zero() -> None:
    record = slice_record("w", (4, 4), init=NORMAL, decay=True)
    read = initial_reader({"w": record}, 1)
    assert torch.equal(read("w", "exp_avg", (1, 0), (2, 4)), torch.zeros(2, 4))
    assert torch.equal(read("w", "weight", (1, 0), (2, 4)), whole((4, 4))[1:3])


class PeakMemory(TorchFunctionMode):
    """Largest sum of bytes of the tensors that calls of torch returned and that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._live:
                    self._live[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._drop, key)
        return out

    def _drop(self, key: int) -> None:
        self.now -= self._live.pop(key)


def peak_of_drawing(shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]) -> int:
    """Bytes alive at the peak, beyond the result's own."""
    with PeakMemory() as memory:
        out = initial_values(seed=1, name="w", init=NORMAL, shape=shape, offset=offset, extent=extent)
    return memory.peak - out.numel() * out.element_size()


def test_temporaries_do_not_grow_with_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 256 MB at the chunk that is used, whole rows or an inner slice, however large the tensor."""
    assert init._CHUNK == 1 << 20
    monkeypatch.setattr(init, "_CHUNK", 1 << 14)
    rows = peak_of_drawing((1 << 17, 4), (1 << 16, 0), (1 << 16, 4))
    inner = peak_of_drawing((2, 1 << 16, 4), (0, 1 << 15, 0), (2, 1 << 15, 4))
    assert 0 < 64 * max(rows, inner) <= 256e6
    assert peak_of_drawing((1 << 18, 4), (1 << 16, 0), (1 << 17, 4)) <= rows * 1.02, "grows with the tensor"
    monkeypatch.setattr(init, "_CHUNK", 1 << 18)
    assert peak_of_drawing((1 << 17, 4), (1 << 16, 0), (1 << 16, 4)) > 8 * rows, "the meter does not see chunks"
