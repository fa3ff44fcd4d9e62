"""Each parallel layer against the unsplit one, in fp64: outputs, input gradients and parameter gradients.

A test draws about 25 shapes from a seed, sends them to the ranks in one call, computes the same on one process
here, and compares what the ranks' records put together. Odd sizes wherever the layout allows them; what lies in
the padding is garbage, so that a use of it shows.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from cases import make_batches, make_config, single_run
from pool import RankPool
from torch import nn

from megatron_port.backend.providers import torch_providers
from megatron_port.config.schema import LayoutConfig, ModelConfig
from megatron_port.model.attention import SelfAttention
from megatron_port.model.build import BuildContext
from megatron_port.model.layers import Embedding, Head, TransformerLayer
from megatron_port.model.mlp import MLP
from megatron_port.model.norm import Norm
from megatron_port.optim.gradients import reduce_partial_gradients
from megatron_port.parallel.collectives import Started
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.parallel.embedding import VocabParallelEmbedding, padded_vocab_size, vocab_parameter
from megatron_port.parallel.init import initial_values
from megatron_port.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import InitSpec, record_of, split_record
from megatron_port.parallel.topology import Topology
from megatron_port.train.assemble import build_engine
from megatron_port.train.parity import FP64, Run, compare
from megatron_port.train.trace import RankTrace, assemble, record_run

BOUND = 1e-9
DRAWS = 25
GARBAGE = 7.0
WEIGHT = InitSpec("normal", 0.3)


@dataclass(frozen=True)
class Case:
    """One layer of one shape. ``sizes``: what the layer's function below needs."""

    layer: str
    seed: int
    sp: bool
    seq: int
    batch: int
    sizes: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Part:
    """A rank's part of one tensor; ``offset`` None: the rank has all of it."""

    shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    tensor: torch.Tensor


Parts = dict[str, Part]


# ---------------------------------------------------------------- on a rank


class Bench:
    """One case on this rank: makes the global tensors from the seed, cuts them, and collects the results."""

    def __init__(self, case: Case, ctx: ParallelContext) -> None:
        self.case, self.ctx = case, ctx
        self.tp, self.rank = ctx.topology.tp, ctx.coords.tp
        self.sp = case.sp and self.tp > 1
        self.generator = torch.Generator().manual_seed(case.seed)
        self.parts: Parts = {}

    def random(self, *shape: int) -> torch.Tensor:
        """The next global tensor; the same on every rank."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def integers(self, limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=self.generator)

    def cut(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        """This rank's slice along ``dim`` (None: all), as a leaf."""
        piece = x if dim is None else x.chunk(self.tp, dim)[self.rank]
        return piece.clone().contiguous()

    def note(self, name: str, tensor: torch.Tensor | None, shape: Sequence[int], dim: int | None) -> None:
        assert tensor is not None, f"{name} is missing"
        offset = None
        if dim is not None and self.tp > 1:
            offset = tuple(self.rank * n if d == dim else 0 for d, n in enumerate(tensor.shape))
        self.parts[name] = Part(tuple(shape), offset, tensor.detach().clone())

    def fill(self, module: nn.Module | nn.Parameter) -> list[nn.Parameter]:
        """Weights, biases and norms alike from their names; garbage in the padding."""
        parameters = [module] if isinstance(module, nn.Parameter) else list(module.parameters())
        with torch.no_grad():
            for p in parameters:
                r = record_of(p)
                p.fill_(GARBAGE)
                r.local_view(p).copy_(
                    initial_values(
                        seed=self.case.seed, name=r.name, init=WEIGHT, shape=r.shape, offset=r.offset, extent=r.extent
                    )
                )
        return parameters

    def note_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """As an engine does: partial gradients are summed over tp, slices put together by their records."""
        grads = []
        for p in parameters:
            assert p.grad is not None, f"{record_of(p).name} has no gradient"
            grads.append((record_of(p), p.grad))
        reduce_partial_gradients(grads, self.ctx)
        for r, grad in grads:
            whole = not r.is_split or self.tp == 1
            self.parts[r.name] = Part(r.shape, None if whole else r.offset, r.local_view(grad).clone())
            r.local_view(grad).zero_()
            assert not bool(grad.any()), f"{r.name}: the padding has a gradient"

    def build(self) -> BuildContext:
        sizes = self.case.sizes
        stream = DropoutStream(5, torch.device("cpu"))
        stream.set_micro_batch(3, tuple(range(40, 40 + self.case.batch)))
        layout = LayoutConfig(
            tensor_parallel_size=self.tp, sequence_parallel=self.case.sp, **sizes.get("layout", {})
        )
        return BuildContext(
            model=sizes["model"], layout=layout, ctx=self.ctx, providers=torch_providers(), stream=stream,
            dtype=torch.float64,
        )

    def residual(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], stream: DropoutStream,
        bias: nn.Parameter | None = None,
    ) -> Parts:
        """A layer that maps the residual stream [seq(/tp), batch, hidden] to itself, but for ``bias``, left to us."""
        hidden = self.case.sizes["model"].hidden_size
        shape = (self.case.seq, self.case.batch, hidden)
        x, g = self.random(*shape), self.random(*shape)
        dim = 0 if self.sp else None
        x = self.cut(x, dim).requires_grad_()
        y = module(x) if bias is None else module(x) + bias
        # By the time of the backward pass an engine works on another micro-batch.
        stream.set_micro_batch(4, tuple(range(90, 90 + self.case.batch)))
        y.backward(self.cut(g, dim))
        self.note("output", y, shape, dim)
        self.note("input gradient", x.grad, shape, dim)
        self.note_gradients(parameters)
        return self.parts


def column(b: Bench) -> Parts:
    n_in, n_out, packed, bias = (b.case.sizes[k] for k in ("n_in", "n_out", "packed", "bias"))
    layer = ColumnParallelLinear(
        "column", n_in, n_out, ctx=b.ctx, sequence_parallel=b.sp, bias=bias, init=WEIGHT, packed=packed,
        dtype=torch.float64,
    )
    parameters = b.fill(layer)
    seq, batch = b.case.seq, b.case.batch
    x, g = b.random(seq, batch, n_in), b.random(seq, batch, packed, n_out)
    dim = 0 if b.sp else None
    x = b.cut(x, dim).requires_grad_()
    y = layer(x).view(seq, batch, packed, n_out // b.tp)
    y.backward(b.cut(g, 3))
    b.note("output", y, (seq, batch, packed, n_out), 3)
    b.note("input gradient", x.grad, (seq, batch, n_in), dim)
    b.note_gradients(parameters)
    return b.parts


def row(b: Bench) -> Parts:
    n_in, n_out, bias = (b.case.sizes[k] for k in ("n_in", "n_out", "bias"))
    layer = RowParallelLinear(
        "row", n_in, n_out, ctx=b.ctx, sequence_parallel=b.sp, bias=bias, init=WEIGHT, dtype=torch.float64
    )
    parameters = b.fill(layer)
    seq, batch = b.case.seq, b.case.batch
    x, g = b.random(seq, batch, n_in), b.random(seq, batch, n_out)
    dim = 0 if b.sp else None
    x = b.cut(x, 2).requires_grad_()
    y = layer(x)
    y.backward(b.cut(g, dim))
    b.note("output", y, (seq, batch, n_out), dim)
    b.note("input gradient", x.grad, (seq, batch, n_in), 2)
    b.note_gradients(parameters)
    return b.parts


def edge_ids(b: Bench, vocab: int) -> torch.Tensor:
    """Token ids [seq, batch] that hold the first and last real row of every rank's slice at tp 2 and 4."""
    ids = b.integers(vocab, b.case.seq, b.case.batch).view(-1)
    edges = {0, vocab - 1}
    for tp in (2, 4):
        each = padded_vocab_size(vocab, tp=tp, multiple=b.case.sizes["multiple"]) // tp
        edges |= {min(r * each + d, vocab - 1) for r in range(tp) for d in (-1, 0)} - {-1}
    for place, token in enumerate(sorted(edges)[: len(ids)]):
        ids[place] = token
    return ids[torch.randperm(len(ids), generator=b.generator)].view(b.case.seq, b.case.batch)


def embedding(b: Bench) -> Parts:
    vocab, hidden, multiple = (b.case.sizes[k] for k in ("vocab", "hidden", "multiple"))
    weight = vocab_parameter(
        "embedding", vocab, hidden, ctx=b.ctx, padding_multiple=multiple, init=WEIGHT, dtype=torch.float64
    )
    parameters = b.fill(weight)
    layer = VocabParallelEmbedding(weight, ctx=b.ctx, sequence_parallel=b.sp)
    shape = (b.case.seq, b.case.batch, hidden)
    ids, g = edge_ids(b, vocab), b.random(*shape)
    dim = 0 if b.sp else None
    y = layer(ids)
    y.backward(b.cut(g, dim))
    b.note("output", y, shape, dim)
    b.note_gradients(parameters)
    return b.parts


def cross_entropy(b: Bench) -> Parts:
    vocab, multiple, scale = (b.case.sizes[k] for k in ("vocab", "multiple", "scale"))
    record = split_record(
        "logits", (vocab, 1), init=WEIGHT, decay=False, split_dim=0, tp_rank=b.rank, tp_size=b.tp,
        padded=padded_vocab_size(vocab, tp=b.tp, multiple=multiple),
    )
    seq, batch = b.case.seq, b.case.batch
    labels, logits, g = edge_ids(b, vocab), b.random(seq, batch, vocab) * scale, b.random(seq, batch)
    offset, extent = record.offset[0], record.extent[0]
    local = torch.full((seq, batch, record.local_shape[0]), 1e3 * GARBAGE, dtype=torch.float64)
    local[..., :extent] = logits[..., offset : offset + extent]
    before = local.clone()
    local.requires_grad_()
    loss = vocab_parallel_cross_entropy(local, labels, offset=offset, extent=extent, group=b.ctx.tp_group)
    assert torch.equal(local.detach(), before), "the forward pass changed the logits"
    loss.backward(g)
    assert local.grad is not None and torch.equal(local.detach(), local.grad), "the gradient is not in their place"
    assert local.grad is not None and not bool(local.grad[..., extent:].any()), "the padding has a gradient"
    b.note("output", loss, (seq, batch), None)
    grad = local.grad[..., :extent].clone()
    b.parts["input gradient"] = Part((seq, batch, vocab), None if b.tp == 1 else (0, 0, offset), grad)
    return b.parts


def attention(b: Bench) -> Parts:
    build = b.build()
    module = SelfAttention("attention", build)
    return b.residual(module, b.fill(module), build.stream, module.output.bias)


def mlp(b: Bench) -> Parts:
    build = b.build()
    module = MLP("mlp", build)
    return b.residual(module, b.fill(module), build.stream, module.down.bias)


def norm(b: Bench) -> Parts:
    build = b.build()
    module = Norm("norm", build)
    return b.residual(module, b.fill(module), build.stream)


def layer(b: Bench) -> Parts:
    build = b.build()
    module = TransformerLayer(1, build)
    return b.residual(module, b.fill(module), build.stream)


def model_embedding(b: Bench) -> Parts:
    """Word and position embedding with dropout, from tokens [batch, seq]."""
    build = b.build()
    module = Embedding(build)
    parameters = b.fill(module)
    model = build.model
    shape = (b.case.seq, b.case.batch, model.hidden_size)
    tokens, g = b.integers(model.vocab_size, b.case.batch, b.case.seq), b.random(*shape)
    dim = 0 if b.sp else None
    y = module(tokens)
    y.backward(b.cut(g, dim))
    b.note("output", y, shape, dim)
    b.note_gradients(parameters)
    return b.parts


def head(b: Bench) -> Parts:
    """Final norm, projection to the vocabulary and loss of each token [batch, seq]."""
    build = b.build()
    module = Head(build)
    parameters = b.fill(module)
    model = build.model
    x = b.random(b.case.seq, b.case.batch, model.hidden_size)
    labels, g = b.integers(model.vocab_size, b.case.batch, b.case.seq), b.random(b.case.batch, b.case.seq)
    dim = 0 if b.sp else None
    x = b.cut(x, dim).requires_grad_()
    loss = module.token_losses(module(x), labels)
    loss.backward(g)
    b.note("output", loss, (b.case.batch, b.case.seq), None)
    b.note("input gradient", x.grad, (b.case.seq, b.case.batch, model.hidden_size), dim)
    b.note_gradients(parameters)
    return b.parts


LAYERS: dict[str, Callable[[Bench], Parts]] = {
    f.__name__: f
    for f in (column, row, embedding, cross_entropy, attention, mlp, norm, layer, model_embedding, head)
}


def on_rank(cases: Sequence[Case], broken: tuple[str, str] | None = None) -> list[Parts]:
    """All cases on this rank. ``broken``: (module, function) that returns its first argument meanwhile."""
    import torch.distributed as dist

    ctx = ParallelContext.create(Topology(tp=dist.get_world_size()), "cpu")
    fault: Any = contextlib.nullcontext()
    if broken is not None:
        unchanged = (lambda x, *_: Started(None, x)) if broken[1].startswith("start_") else (lambda x, *_: x)
        fault = mock.patch(".".join(broken), unchanged)
    try:
        with fault:
            return [LAYERS[case.layer](Bench(case, ctx)) for case in cases]
    finally:
        ctx.close()


# ---------------------------------------------------------------- here


def one_process(cases: Sequence[Case]) -> list[Parts]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [LAYERS[case.layer](Bench(case, ParallelContext.single())) for case in cases]
    finally:
        torch.set_num_threads(threads)


def deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|Δ| ÷ max|want|; infinite where a value is not a number."""
    assert got.shape == want.shape, (got.shape, want.shape)
    value = float((got - want).abs().max()) / max(float(want.abs().max()), 1e-30)
    return value if value == value else float("inf")


def faults(cases: Sequence[Case], results: Sequence[Sequence[Parts]], wanted: Sequence[Parts]) -> list[str]:
    """What differs from one process by more than BOUND; ``results`` by rank."""
    out = []
    for i, (case, want) in enumerate(zip(cases, wanted)):
        ranks = [r[i] for r in results]
        assert all(r.keys() == want.keys() for r in ranks), (case, sorted(ranks[0]), sorted(want))
        for name, reference in want.items():
            parts = [r[name] for r in ranks]
            if parts[0].offset is None:
                worst = max(deviation(p.tensor, reference.tensor) for p in parts)
            else:
                slices = [[(name, p.shape, p.offset or (), p.tensor)] for p in parts]
                worst = deviation(assemble(slices)[name], reference.tensor)
            if not worst <= BOUND:
                out.append(f"{name} differs by {worst:.1e}: {case}")
    return out


def check(ranks: RankPool, tp: int, cases: Sequence[Case]) -> None:
    wanted = one_process(cases)
    assert all(float(p.tensor.abs().max()) > 0 for parts in wanted for p in parts.values())
    bad = faults(cases, ranks.run(tp, on_rank, list(cases)), wanted)
    assert not bad, f"{len(bad)} of {len(cases)} cases:\n" + "\n".join(bad)


def draw(layer_name: str, tp: int, sizes: Callable[[random.Random, bool], dict[str, Any]]) -> list[Case]:
    """DRAWS cases: sequence parallel in every other one, where the sequence must divide by tp."""
    out = []
    for i in range(DRAWS):
        seed = int.from_bytes(f"{layer_name}{tp}{i}".encode()[-6:], "little")
        r = random.Random(seed)
        sp = i % 2 == 0
        seq = tp * r.randint(1, 4) if sp else r.choice([1, 3, 5, 7, 8])
        out.append(Case(layer_name, seed % (1 << 31), sp, seq, r.randint(1, 3), sizes(r, sp)))
    return out


both = pytest.mark.parametrize("tp", [2, 4])


@both
def test_column_parallel_linear(ranks: RankPool, tp: int) -> None:
    check(ranks, tp, draw("column", tp, lambda r, sp: {
        "n_in": r.choice([1, 3, 7, 13]), "n_out": tp * r.choice([1, 3, 5]), "packed": r.choice([1, 1, 2, 3]),
        "bias": r.random() < 0.6,
    }))


@both
def test_row_parallel_linear(ranks: RankPool, tp: int) -> None:
    check(ranks, tp, draw("row", tp, lambda r, sp: {
        "n_in": tp * r.choice([1, 3, 5]), "n_out": r.choice([1, 3, 7, 13]), "bias": r.random() < 0.8,
    }))


@both
def test_vocabulary_parallel_embedding(ranks: RankPool, tp: int) -> None:
    """Odd vocabularies; with a multiple of 8, ranks that hold padding alone."""
    cases = draw("embedding", tp, lambda r, sp: {
        "vocab": r.choice([tp + 1, 5, 7, 11, 53]), "hidden": r.choice([1, 3, 8]), "multiple": r.choice([1, 8]),
    })
    assert any(c.sizes["vocab"] <= 8 == c.sizes["multiple"] for c in cases)
    check(ranks, tp, cases)


@both
def test_vocabulary_parallel_cross_entropy(ranks: RankPool, tp: int) -> None:
    """Labels in every slice; logits so large that exp overflows without the maximum."""
    cases = draw("cross_entropy", tp, lambda r, sp: {
        "vocab": r.choice([tp + 1, 5, 7, 11, 53]), "multiple": r.choice([1, 8]), "scale": r.choice([1.0, 5.0, 1000.0]),
    })
    check(ranks, tp, cases)


def test_cross_entropy_is_torchs(ranks: RankPool) -> None:
    """The unsplit reference itself, against torch.nn.functional.cross_entropy."""
    cases = draw("cross_entropy", 2, lambda r, sp: {"vocab": 11, "multiple": r.choice([1, 8]), "scale": 3.0})
    for case, parts in zip(cases, one_process(cases)):
        b = Bench(case, ParallelContext.single())
        labels, logits = edge_ids(b, 11), (b.random(case.seq, case.batch, 11) * 3.0).requires_grad_()
        g = b.random(case.seq, case.batch)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(g)
        loss.backward(g)
        assert deviation(parts["output"].tensor, loss.detach()) < 1e-12
        assert deviation(parts["input gradient"].tensor, logits.grad) < 1e-12  # type: ignore[arg-type]


def model_sizes(r: random.Random, tp: int, **fixed: Any) -> ModelConfig:
    """A model with grouped heads, odd widths and, in half of the draws, dropout."""
    groups = tp * r.choice([1, 1, 2])
    norm_kind, position = r.choice(["layernorm", "rmsnorm"]), r.choice(["learned", "rope"])
    values: dict[str, Any] = {
        "num_layers": 2, "hidden_size": r.choice([3, 7, 12]), "num_query_groups": groups,
        "num_attention_heads": groups * r.choice([1, 2, 3]),
        "head_dim": r.choice([2, 4] if position == "rope" else [1, 3, 4]),
        "ffn_hidden_size": tp * r.choice([1, 3, 5]), "vocab_size": r.choice([tp + 1, 7, 23]),
        "seq_length": 16, "position_embedding": position, "normalization": norm_kind,
        "activation": r.choice(["gelu", "gelu_tanh", "swiglu"]), "add_bias": r.random() < 0.7,
        "hidden_dropout": r.choice([0.0, 0.3]), "attention_dropout": r.choice([0.0, 0.3]),
    }
    return ModelConfig(**{**values, **fixed})


@both
@pytest.mark.parametrize("name", ["attention", "mlp", "norm", "model_embedding", "head"])
def test_blocks_of_the_model(ranks: RankPool, tp: int, name: str) -> None:
    """SelfAttention (1 to 3 query heads a group, rotary or not), MLP, both norms, embedding and head."""
    def sizes(r: random.Random, sp: bool) -> dict[str, Any]:
        layout = {"vocab_padding_multiple": r.choice([1, 8])}
        if name == "attention":
            layout["recompute"] = r.choice(["none", "selective"])
        return {"model": model_sizes(r, tp), "layout": layout}

    check(ranks, tp, draw(name, tp, sizes))


@both
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_transformer_layer(ranks: RankPool, tp: int, recompute: str) -> None:
    cases = draw("layer", tp, lambda r, sp: {"model": model_sizes(r, tp), "layout": {"recompute": recompute}})
    assert any(c.sizes["model"].hidden_dropout and c.sizes["model"].attention_dropout and c.sp for c in cases)
    check(ranks, tp, cases)


def test_recompute_changes_no_bit() -> None:
    """On one process: full and selective recompute give the very gradients of keeping all activations."""
    plain = draw("layer", 2, lambda r, sp: {"model": model_sizes(r, 2), "layout": {"recompute": "none"}})
    wanted = one_process(plain)
    for kind in ("selective", "full"):
        cases = [replace(c, sizes={**c.sizes, "layout": {"recompute": kind}}) for c in plain]
        for got, want in zip(one_process(cases), wanted):
            assert all(torch.equal(got[name].tensor, want[name].tensor) for name in want)


BROKEN = {
    "no sum of the input's gradients": ("column", False, "megatron_port.parallel.linear.start_all_reduce"),
    "no sum of the outputs": ("row", False, "megatron_port.parallel.linear.reduce_from_tp"),
    "no sum of the embeddings": ("embedding", False, "megatron_port.parallel.embedding.reduce_from_tp"),
    "partial gradients of norms": ("norm", True, "megatron_port.optim.gradients._all_reduce_flat"),
    "partial gradients of biases": ("row", True, "megatron_port.optim.gradients._all_reduce_flat"),
    "partial gradients of positions": ("model_embedding", True, "megatron_port.optim.gradients._all_reduce_flat"),
    "no sum before the head": ("head", False, "megatron_port.parallel.linear.start_all_reduce"),
}


@pytest.mark.parametrize("mistake", BROKEN)
def test_these_comparisons_can_fail(ranks: RankPool, mistake: str) -> None:
    """Each collective left out shows in every case that needs it."""
    name, sp, target = BROKEN[mistake]
    r = random.Random(3)
    model = model_sizes(r, 2, position_embedding="learned", normalization="layernorm", add_bias=True)
    sizes = {
        "n_in": 6, "n_out": 6, "packed": 1, "bias": True, "vocab": 11, "hidden": 3, "multiple": 1, "model": model,
        "layout": {},
    }
    cases = [Case(name, seed, sp, 4, 2, sizes) for seed in range(3)]
    wanted = one_process(cases)
    assert not faults(cases, ranks.run(2, on_rank, cases), wanted)
    module, _, function = target.rpartition(".")
    bad = faults(cases, ranks.run(2, on_rank, cases, (module, function)), wanted)
    assert {text.split(": Case")[1] for text in bad} == {repr(c).removeprefix("Case") for c in cases}


def train_without_partial_sums(config: Any, steps: int) -> RankTrace:
    """The native engine that does not know of a partial gradient."""
    ctx = ParallelContext.create(Topology(tp=2), "cpu")
    with mock.patch("megatron_port.optim.buckets._kind", lambda record: "plain"):
        engine = build_engine(config, ctx, torch_providers())
        return record_run(engine, ctx, make_batches(config, ctx), steps=steps, lr=lambda step: 1e-2, evaluate=True)


def test_an_engine_without_partial_sums_is_found_and_named(ranks: RankPool) -> None:
    """Sequence parallelism's silent error: the loss of the first step is right, the norms' gradients are not."""
    config = make_config(dtype="fp64", layout={"sequence_parallel": True})
    traces = ranks.run(2, train_without_partial_sums, config, 2)
    deviations = compare(single_run(config, steps=2), Run.of(traces), FP64, config.model, lr=1e-2)
    bad = {d.quantity: d for d in deviations if not d.ok}
    assert {"gradient", "grad norm", "weight / lr", "copies"} <= set(bad)
    assert abs(traces[0].losses[0] - single_run(config, steps=1).losses[0]) < 1e-12
    assert any(word in bad["gradient"].where for word in ("norm", "position", "bias")), bad["gradient"].where
