"""No two layers, ops, samples, steps, corpora or seeds share a stream of random numbers, and each is its definition.

The definitions are those of evidence/definitions.md, as ``tests/twin`` has them without a line of the program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from dropped import dropped
from hypothesis import given, settings
from hypothesis import strategies as st
from twin import data as twin_data
from twin import streams
from twin.model import Shape
from twin.model import initial as twin_initial

from megatron_port.core.config.schema import LayoutConfig, ModelConfig
from megatron_port.core.data.dataset import BlendedDataset, derive, permute, quantised
from megatron_port.core.dist.counter import key_of
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import initial_reader, initial_values
from megatron_port.core.layers.dropout import DropoutStream, op_key
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.shapes import model_records

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**63 - 1)
PARTS = st.lists(st.one_of(st.integers(0, 2**70), st.text(max_size=12)), max_size=4)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Small models of every kind."""
    heads = draw(st.sampled_from((2, 4)))
    return ModelConfig(
        num_layers=draw(st.integers(1, 5)), hidden_size=16, num_attention_heads=heads,
        num_query_groups=draw(st.sampled_from((0, 1, 2))), ffn_hidden_size=draw(st.sampled_from((8, 24))),
        vocab_size=draw(st.sampled_from((17, 64))), seq_length=8,
        position_embedding=draw(st.sampled_from(("learned", "rope"))),
        normalization=draw(st.sampled_from(("layernorm", "rmsnorm"))),
        activation=draw(st.sampled_from(("gelu", "gelu_tanh", "swiglu"))), add_bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()), parallel_residual=draw(st.booleans()), qk_norm=draw(st.booleans()),
        hidden_dropout=0.1, attention_dropout=draw(st.sampled_from((0.0, 0.2))),
        init_std=draw(st.sampled_from((0.02, 0.5))),
    )


def twin_shape(model: ModelConfig) -> Shape:
    """The same model for the twin."""
    values = {f.name: getattr(model, f.name) for f in dataclasses.fields(Shape) if f.name != "num_query_groups"}
    return Shape(**{**values, "num_query_groups": model.kv_heads, "ffn_hidden_size": model.ffn_size})


def build_context(model: ModelConfig, stream: DropoutStream, *, fused: Any = None, **options: Any) -> BuildContext:
    return BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single(),
        providers=dataclasses.replace(torch_providers(), bias_dropout_add=fused),
        step=StepSlot(stream), dtype=torch.float32, options=BuildOptions(**options),
    )


# ---------------------------------------------------------------- keys


@settings(max_examples=100, deadline=None)
@given(PARTS, PARTS)
def test_keys_are_their_definition_and_differ(a: list[int | str], b: list[int | str]) -> None:
    assert key_of(*a) % 2**64 == streams.key(*a)
    separated = any("\x1f" in p for p in (*a, *b) if isinstance(p, str))
    if a != b and not separated:
        assert key_of(*a) != key_of(*b)


# ---------------------------------------------------------------- initial weights


@settings(max_examples=15, deadline=None)
@given(models(), SEEDS)
def test_initial_weights_are_the_twins(model: ModelConfig, seed: int) -> None:
    """Through what an engine loads at its start. The twin's quantile function is another, within 2e-14: about one
    float32 in a million may be rounded to the other side."""
    records = model_records(model)
    read, want = initial_reader(records, seed), twin_initial(twin_shape(model), seed)
    assert set(records) == set(want)
    for name, record in records.items():
        got = read(name, "weight", (0,) * len(record.shape), record.shape)
        torch.testing.assert_close(got, want[name], rtol=2e-7, atol=0, msg=name)
        assert int((got != want[name]).sum()) <= 1 + got.numel() // 1000, name


@settings(max_examples=15, deadline=None)
@given(models(), SEEDS)
def test_no_two_parameters_share_their_draws(model: ModelConfig, seed: int) -> None:
    """Nor two seeds: normalised by their std, the first values of any two have nothing to do with one another."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for s in (seed, seed + 1):
        for name, record in model_records(model).items():
            if record.init.kind == "normal":
                head = initial_values(seed=s, name=name, init=record.init, shape=(256,), offset=(0,), extent=(256,))
                found[s, name] = head / record.init.std
    assert len({name for _, name in found}) >= 4 * model.num_layers + 1
    for (a, x), (b, y) in itertools.combinations(found.items(), 2):
        assert int((x == y).sum()) < 4 and abs(float((x * y).mean())) < 0.6, (a, b)


# ---------------------------------------------------------------- dropout


class Recording(DropoutStream):
    """Counts the ops whose masks are asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, CPU)
        self.asked: Counter[str] = Counter()

    def op_key(self, op: str) -> int:
        self.asked[op] += 1
        return super().op_key(op)


def fused_stand_in(x: Any, bias: Any, residual: Any, keys: Any, **_: Any) -> torch.Tensor:
    """In the place of the own kernel: what it is asked to drop goes through ``op_key`` before."""
    return residual + (x if bias is None else x + bias)


@settings(max_examples=12, deadline=None)
@given(models(), st.sampled_from(("none", "full")), st.booleans())
def test_every_place_drops_with_an_op_of_its_own(model: ModelConfig, recompute: str, fused: bool) -> None:
    stream = Recording(1)
    build = build_context(model, stream, fused=fused_stand_in if fused else None, recompute=recompute)
    stage = GPTStage(build, start=0, stop=model.num_layers)
    stream.set_micro_batch(0, (5, 6))
    stage(torch.zeros(2, model.seq_length, dtype=torch.int64))
    branches = ["attention", "mlp", *(["attention.probs"] if model.attention_dropout else [])]
    want = {"embedding", *(f"layers.{i}.{b}" for i in range(model.num_layers) for b in branches)}
    assert stream.asked == Counter(want)
    assert len({op_key(op) for op in want}) == len(want)


NAMES = st.sampled_from(["embedding", *(f"layers.{i}.{b}" for i in (0, 1, 10, 11) for b in ("attention", "mlp"))])


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(0, 10**7), st.lists(st.integers(0, 2**40), min_size=1, max_size=3, unique=True), NAMES,
       st.sampled_from((0.1, 0.5, 0.31)), st.integers(1, 9), st.integers(1, 9))
def test_masks_are_the_twins(
    seed: int, step: int, samples: list[int], op: str, p: float, rows: int, width: int
) -> None:
    stream = DropoutStream(seed, CPU)
    stream.set_micro_batch(step, samples)
    got = stream.dropout(torch.ones(rows, len(samples), width, dtype=torch.float64), p, op=op)
    assert torch.equal(got.transpose(0, 1), streams.dropout_factors(seed, step, samples, op, (rows, width), p))
    probs = dropped(
        stream, torch.ones(len(samples), 2, rows, rows, dtype=torch.float64), p, op=op, head_offset=0
    )
    assert torch.equal(probs, streams.dropout_factors(seed, step, samples, op, (2, rows, rows), p))


@settings(max_examples=60, deadline=None)
@given(st.tuples(SEEDS, st.integers(0, 10**7), st.integers(0, 2**40), NAMES),
       st.tuples(SEEDS, st.integers(0, 10**7), st.integers(0, 2**40), NAMES), st.integers(1, 15))
def test_masks_of_any_two_places_are_unrelated(
    a: tuple[int, int, int, str], b: tuple[int, int, int, str], which: int
) -> None:
    """``which``: the parts of (seed, step, sample, op), as bits, in which the two differ."""
    mixed: Any = tuple(y if which >> i & 1 else x for i, (x, y) in enumerate(zip(a, b)))
    if mixed == a:
        return
    masks = []
    for seed, step, sample, op in (a, mixed):
        stream = DropoutStream(seed, CPU)
        stream.set_micro_batch(step, (sample,))
        masks.append(stream.dropout(torch.ones(64, 1, 64), 0.5, op=op) != 0)
    agree = float((masks[0] == masks[1]).double().mean())
    assert abs(agree - 0.5) < 6.5 * 0.5 / 64, "two places of a run drop the same elements"


# ---------------------------------------------------------------- order of samples


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.data())
def test_the_order_is_the_twins(n: int, name: int, data: st.DataObject) -> None:
    x = data.draw(st.integers(0, n - 1))
    assert int(permute(np.array([x]), n, name)[0]) == twin_data.permuted(x, n, name)
    values = data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=3))
    assert derive(*values) == streams.derive(*values)


class Told:
    """A dataset that remembers what it was asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.asked: list[tuple[int, int]] = []
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def draw(self, seed: int, k: int) -> np.ndarray:
        self.asked.append((seed, k))
        return np.zeros(2, np.int64)

    def sample(self, index: int) -> np.ndarray:
        self.read.append(index)
        return np.zeros(2, np.int64)


def test_a_corpus_ahead_of_its_share_is_not_read_beyond_its_end() -> None:
    parts: list[Any] = [Told(n) for n in (1, 1, 1, 10)]
    mine = BlendedDataset(parts, [1.0, 1.0, 1.0, 29.0])
    for k in range(len(mine)):
        mine.sample(k)
    assert [sorted(p.read) for p in parts] == [[0], [0], [0], list(range(10))]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.data(), SEEDS)
def test_blends_are_the_twins_and_each_corpus_has_its_own_seed(
    sizes: list[int], data: st.DataObject, seed: int
) -> None:
    weights = data.draw(st.lists(st.integers(1, 30).map(float), min_size=len(sizes), max_size=len(sizes)))
    period = sum(quantised(weights))
    ours: list[Any] = [Told(n) for n in sizes]
    parts = [Told(n) for n in sizes]
    mine = BlendedDataset(ours, weights)
    assert quantised(weights) == twin_data.shares(weights)
    if period > 4096:  # the twin's pattern is made in plain Python
        return
    for part in parts:  # what the twin calls them
        part.drawn, part.stored = part.draw, part.sample  # type: ignore[assignment,attr-defined]
    other = twin_data.Blend(parts, weights)  # type: ignore[arg-type]
    assert len(mine) == other.size
    for k in range(2 * period + 3):
        mine.draw(seed, k)
        other.drawn(seed, k)
    for k in range(len(mine)):
        mine.sample(k)
        other.stored(k)
    assert [sorted(d.read) for d in ours] == [list(range(n)) for n in sizes], "each sample once"
    assert [(d.asked, d.read) for d in ours] == [(d.asked, d.read) for d in parts]
    seeds = [{s for s, _ in d.asked} for d in ours]
    assert all(len(s) == 1 for s in seeds) and len(set.union(*seeds, {seed})) == len(sizes) + 1
    for d in ours:
        assert [k for _, k in d.asked] == list(range(len(d.asked))), "a corpus is gone through in order"


@pytest.mark.parametrize("n", [50, 257])
def test_no_two_epochs_seeds_or_corpora_share_an_order(n: int) -> None:
    keys = [derive(s, e) for seed in (1, 2) for s in (seed, derive(seed, 0), derive(seed, 1)) for e in range(3)]
    orders = [tuple(permute(np.arange(n), n, k)) for k in keys]
    assert len(set(keys)) == len(set(orders)) == 18
    for a, b in itertools.combinations(orders, 2):
        assert sum(x == y for x, y in zip(a, b)) < 12  # 1 is expected
