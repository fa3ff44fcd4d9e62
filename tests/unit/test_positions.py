"""Positions of tokens: every token on one rank, and a rank with two runs computes the rows of the whole result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from dropped import dropped
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.schema import BackendConfig, LayoutConfig, ModelConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.positions import WHOLE_SEQUENCE, Positions, Run, SequencePartition, sequence_partition
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import Providers, torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.decoder_spec import attention_spec, model_spec
from megatron_port.core.model.layers import Embedding, Norm
from megatron_port.ext.context.division import ChunkDivision, divide
from megatron_port.ext.kernels.choose import choose_providers
from megatron_port.run.device import choose_device

CPU = torch.device("cpu")
SEQ, BATCH = 32, 2
MODEL = ModelConfig(
    num_layers=1, hidden_size=24, num_attention_heads=2, vocab_size=50, seq_length=SEQ, hidden_dropout=0.3,
    attention_dropout=0.2,
)


def zigzag(rank: int, ranks: int, *, piece: int = 0, pieces: int = 1) -> SequencePartition:
    """One early and one late chunk each, so that causal attention costs every rank the same."""
    return SequencePartition(divide(ranks, "zigzag"), rank, piece, pieces)


def build_of(
    partition: SequencePartition, model: ModelConfig = MODEL, providers: Providers | None = None
) -> BuildContext:
    stream = DropoutStream(3, CPU)
    stream.set_micro_batch(7, tuple(range(40, 40 + BATCH)))
    return BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single(),
        providers=providers or torch_providers(), step=StepSlot(stream), dtype=torch.float32, partition=partition,
    )


def own_providers() -> Providers:
    return choose_providers(BackendConfig(own_kernels="on"), choose_device("cpu"), torch.float32, engine="native")


# ---------------------------------------------------------------- arithmetic


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_each_position_is_in_the_residual_stream_of_one_rank(ranks: int, pieces: int, size: int) -> None:
    seq = 2 * ranks * pieces * size
    found: list[int] = []
    for rank in range(ranks):
        held: list[int] = []
        for piece in range(pieces):
            partition = zigzag(rank, ranks, piece=piece, pieces=pieces)
            mine = partition.residual(seq)
            assert mine.count == seq // ranks // pieces and partition.seq_length(mine.count * pieces) == seq
            assert mine.stop == max(mine.index(CPU)) + 1
            assert all(sum(a) != b.start for a, b in zip(mine.runs, mine.runs[1:])), "runs that could be one"
            held += mine.index(CPU).tolist()
        # In order: what a gather of the pieces gives is what the rank holds.
        assert held == zigzag(rank, ranks).held(seq).index(CPU).tolist()
        found += held
    assert sorted(found) == list(range(seq))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_layouts_partition(rank: int, sequence_parallel: bool) -> None:
    topology = Topology(tp=4)
    partition = sequence_partition(topology.mesh, rank, sequence_parallel=sequence_parallel)
    assert partition.held(SEQ).runs == (Run(0, SEQ),)
    assert partition.residual(SEQ).runs == ((Run(8 * rank, 8),) if sequence_parallel else (Run(0, SEQ),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ChunkDivision(2, ((1, 0),)), "ascending"),
        (lambda: ChunkDivision(2, ((0,), (2,))), "ascending"),
        (lambda: ChunkDivision(3, ((0, 1), (2,))), "as many"),
        (lambda: SequencePartition(rank=1), "rank 1 of 1"),
        (lambda: SequencePartition(piece=2, pieces=2), "piece 2 of 2"),
        (lambda: SequencePartition(divide(3, "contiguous")).held(8), "8 tokens does not divide into 3"),
        (lambda: SequencePartition(piece=0, pieces=3).residual(8), "8 positions do not divide into 3"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------- two runs through the model


@pytest.mark.parametrize("piece", [0, 1])
def test_positions_from_each_documents_start(piece: int) -> None:
    """On a rank of two runs whose residual stream is a piece of what it holds."""
    part = zigzag(1, 2, piece=piece, pieces=2)
    build = build_of(part, dataclasses.replace(MODEL, position_embedding="learned"))
    starts = torch.tensor([[0] * 5 + [5] * 6 + [11] + [12] * 9 + [21] * 11, list(range(SEQ))], dtype=torch.int32)
    build.step.announce(7, (40, 41), document_starts=starts)
    embedding = Embedding(model_spec(build.model).embedding, build)
    embedding.position_reset = True
    assert embedding.position is not None
    torch.nn.init.normal_(embedding.position.data)
    at = part.residual(SEQ).index(CPU)
    want = torch.stack([embedding.position[at - row[at]] for row in starts.long()], dim=1)
    x = torch.zeros(len(at), 2, build.model.hidden_size)
    assert torch.equal(embedding.own_positions(x), want) and bool((want[:, 1] == embedding.position[0]).all())


@pytest.mark.parametrize("rank", [0, 1])
def test_embedding_of_two_runs(rank: int) -> None:
    """Learned positions and the embedding's dropout, and the gradients of both tables."""
    model = dataclasses.replace(MODEL, position_embedding="learned")
    part = zigzag(rank, 2)
    tokens = torch.randint(0, 50, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    spec = model_spec(model).embedding
    whole, mine = Embedding(spec, build_of(WHOLE_SEQUENCE, model)), Embedding(spec, build_of(part, model))
    for p, q in zip(whole.parameters(), mine.parameters()):
        torch.nn.init.normal_(p.data)
        q.data.copy_(p.data)
    want = part.held(SEQ).take(whole(tokens))
    got = mine(part.held(SEQ).take(tokens, dim=1))
    assert torch.equal(got, want) and 0 < int((got == 0).sum()) < got.numel()
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    want.backward(weights)
    got.backward(weights)
    for p, q in zip(whole.parameters(), mine.parameters()):
        assert torch.equal(p.grad, q.grad) and bool(p.grad.any())  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize("providers", [torch_providers, own_providers])
@pytest.mark.parametrize("rank", [0, 1])
def test_rotary_of_two_runs(rank: int, providers: Callable[[], Providers]) -> None:
    model, part = dataclasses.replace(MODEL, position_embedding="rope"), zigzag(rank, 2)
    spec = attention_spec(model, 0)
    whole, mine = (SelfAttention("a", spec, build_of(p, model, providers())) for p in (WHOLE_SEQUENCE, part))
    y = torch.randn(SEQ, BATCH, 2, 3, 12, generator=torch.Generator().manual_seed(1))
    for want, got in zip(whole.split(y), mine.split(part.held(SEQ).take(y))):
        assert torch.equal(got, part.held(SEQ).take(want))


@pytest.mark.parametrize("providers", [torch_providers, own_providers])
@pytest.mark.parametrize(("rank", "piece", "pieces"), [(0, 0, 1), (1, 0, 1), (0, 0, 2), (0, 1, 2)])
def test_dropout_of_two_runs(rank: int, piece: int, pieces: int, providers: Callable[[], Providers]) -> None:
    """Also of the piece that sequence parallelism leaves of them."""
    part = zigzag(rank, 2, piece=piece, pieces=pieces)
    rows = part.residual(SEQ)
    draw = torch.Generator().manual_seed(1)
    x, residual = (torch.randn(SEQ, BATCH, 24, generator=draw) for _ in range(2))
    bias = torch.randn(24, generator=draw)
    whole, mine = build_of(WHOLE_SEQUENCE, providers=providers()), build_of(part, providers=providers())
    want = whole.residual.bias_dropout_add(x, bias, residual, op="a")
    got = mine.residual.bias_dropout_add(rows.take(x), bias, rows.take(residual), op="a")
    assert torch.equal(got, rows.take(want)) and bool((got == rows.take(residual)).any()), "some are dropped"
    assert torch.equal(mine.residual.drop(rows.take(x), op="b"), rows.take(whole.residual.drop(x, op="b")))


@pytest.mark.parametrize("providers", [torch_providers, own_providers])
@pytest.mark.parametrize("part", [SequencePartition(piece=1, pieces=2), zigzag(1, 2)], ids=["one run", "two runs"])
def test_dropout_and_the_norm_that_follows(part: SequencePartition, providers: Callable[[], Providers]) -> None:
    rows, draw = part.residual(SEQ), torch.Generator().manual_seed(1)
    x, residual = (torch.randn(SEQ, BATCH, 24, generator=draw) for _ in range(2))
    bias = torch.randn(24, generator=draw)
    whole, mine = build_of(WHOLE_SEQUENCE, providers=providers()), build_of(part, providers=providers())
    norm = Norm("layer", model_spec(MODEL).layers[0].norms[1], whole)
    for i, parameter in enumerate(norm.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
    total = whole.residual.bias_dropout_add(x, bias, residual, op="a")
    y, same = whole.residual.bias_dropout_add_norm(x, bias, residual, norm, op="a")
    assert torch.equal(y, norm(total)) and torch.equal(same, total)
    found = mine.residual.bias_dropout_add_norm(rows.take(x), bias, rows.take(residual), norm, op="a")
    assert all(torch.equal(a, rows.take(b)) for a, b in zip(found, (y, total)))


@pytest.mark.parametrize("rank", [0, 1])
def test_attention_dropout_of_two_runs(rank: int) -> None:
    """A rank that has its queries' rows of the probabilities, and the columns of all keys."""
    rows = zigzag(rank, 2).held(SEQ)
    stream = build_of(WHOLE_SEQUENCE).stream
    probs = torch.rand(BATCH, 2, SEQ, SEQ, generator=torch.Generator().manual_seed(1)) + 1.0
    want = rows.take(dropped(stream, probs, 0.2, op="p", head_offset=1), dim=2)
    got = dropped(stream, rows.take(probs, dim=2), 0.2, op="p", head_offset=1, positions=rows)
    assert torch.equal(got, want) and bool((got == 0).any())


def test_what_passes_between_stages_has_the_rows_of_the_residual_stream() -> None:
    stage = GPTStage(build_of(zigzag(1, 2, piece=1, pieces=2)), start=0, stop=1)
    assert stage.boundary(BATCH, SEQ) == {"hidden": ((SEQ // 4, BATCH, 24), torch.float32)}


def test_rows_of_more_positions_than_there_are() -> None:
    with pytest.raises(RuntimeError):
        Positions.contiguous(5, start=6).take(torch.zeros(10))
