"""Parallel layers beside the unsplit ones: forward, backward and comparison in fp64, run on ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from megatron_port.core.config.schema import LayoutConfig
from megatron_port.core.dist.collectives import Started
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.dist.record import InitSpec, Shard, initial_values, make_record, record_of
from megatron_port.core.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.embedding import VocabParallelEmbedding, padded_vocab_size, vocab_parameter
from megatron_port.core.layers.linear import ColumnParallelLinear, LinearContext, RowParallelLinear
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder_spec import attention_spec, model_spec
from megatron_port.core.model.layers import Embedding, Head, Norm, TransformerLayer
from megatron_port.core.model.mlp import MLP
from megatron_port.core.model.spec import LinearSpec
from megatron_port.ext.deepspeed.reduction import reduce_partial_gradients
from megatron_port.tools.parity.run_record import assemble

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
        self.tp, self.rank = ctx.size("tp"), ctx.index("tp")
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
            whole = r.split_dim is None or self.tp == 1
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
        recompute = sizes.get("recompute", "none")
        return BuildContext(
            model=sizes["model"], layout=layout, ctx=self.ctx, providers=torch_providers(), step=StepSlot(stream),
            dtype=torch.float64, options=BuildOptions(recompute=recompute),
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
    spec = LinearSpec(
        name="column", inputs=n_in, outputs=n_out, parallel="column", bias=bias, std=0.3, packed=packed
    )
    layer = ColumnParallelLinear("bench", spec, LinearContext(b.ctx, b.sp, torch.float64))
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
    spec = LinearSpec(name="row", inputs=n_in, outputs=n_out, parallel="row", bias=bias, std=0.3)
    layer = RowParallelLinear("bench", spec, LinearContext(b.ctx, b.sp, torch.float64))
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
    record = make_record(
        "logits", (vocab, 1), b.ctx, init=WEIGHT, decay=False, shards=(Shard(0, ("tp",)),),
        padded=padded_vocab_size(vocab, tp=b.tp, multiple=multiple),
    )
    seq, batch = b.case.seq, b.case.batch
    labels, logits, g = edge_ids(b, vocab), b.random(seq, batch, vocab) * scale, b.random(seq, batch)
    offset, extent = record.offset[0], record.extent[0]
    local = torch.full((seq, batch, record.local_shape[0]), 1e3 * GARBAGE, dtype=torch.float64)
    local[..., :extent] = logits[..., offset : offset + extent]
    before = local.clone()
    local.requires_grad_()
    loss = vocab_parallel_cross_entropy(local, labels, offset=offset, extent=extent, group=b.ctx.over("tp"))
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
    module = SelfAttention("layers.0", attention_spec(build.model, 0), build)
    return b.residual(module, b.fill(module), build.stream, module.output.bias)


def mlp(b: Bench) -> Parts:
    build = b.build()
    module = MLP("layers.0", 0, model_spec(build.model).layers[0].dense, build)
    return b.residual(module, b.fill(module), build.stream, module.down.bias)


def norm(b: Bench) -> Parts:
    build = b.build()
    spec = model_spec(build.model).layers[0].norm1
    assert spec is not None
    module = Norm("layers.0", spec, build)
    return b.residual(module, b.fill(module), build.stream)


def layer(b: Bench) -> Parts:
    build = b.build()
    module = TransformerLayer(1, model_spec(build.model).layers[0], build)
    return b.residual(module, b.fill(module), build.stream)


def model_embedding(b: Bench) -> Parts:
    """Word and position embedding with dropout, from tokens [batch, seq]."""
    build = b.build()
    module = Embedding(model_spec(build.model).embedding, build)
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
    module = Head(model_spec(build.model).head, build)
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
