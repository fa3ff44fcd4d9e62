"""Memory of the operations of which units are made: products, collectives, norms, dropout (for ``plan.tape``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import LinearSpec, MLPSpec, NormSpec
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.tape import Block, Tape, Value


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of one micro-batch on one rank."""

    case: Case

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro-batch."""
        return self.case.model.seq_length / self.case.cp * self.case.micro_batch

    @cached_property
    def torch(self) -> bool:
        """Whether norms, activations, dropout and softmax are torch's ops."""
        return self.case.kernels == "torch"

    @cached_property
    def mask(self) -> int:
        """Bytes per element of a dropout mask that is kept: none where the kernel draws it again."""
        return {"own": 0, "torch": self.case.width}.get(self.case.kernels, 1)

    @cached_property
    def whole(self) -> float:
        """The residual stream of all tokens."""
        return self.tokens * self.case.model.hidden_size * self.case.width

    @cached_property
    def stream(self) -> float:
        """The residual stream of a rank's own tokens."""
        return self.whole / (self.case.tp if self.case.sequence_parallel else 1)

    @cached_property
    def widening(self) -> float:
        """Copies in full precision that a product makes of its operands, by their own size: half precision on a CPU."""
        return self.case.wide / self.case.width if self.case.on_cpu and self.case.width < self.case.wide else 0.0

    @cached_property
    def logits(self) -> float:
        """Logits on a rank of the last stage."""
        return self.tokens * self.case.padded_vocab / self.case.tp * self.case.width

    @cached_property
    def widest_product(self) -> float:
        """Copies that the widest product of a weight gradient makes."""
        if not self.widening:
            return 0.0
        kinds = [layer for layer, _ in model_spec(self.case.model).kinds()]
        features = max(sum(linear.product(self.case.tp)) for layer in kinds for linear in layer.linears)
        return self.tokens * features * self.case.wide

    @cached_property
    def held_keys(self) -> float:
        """Key heads on a rank."""
        return self.case.model.kv_heads_held(self.case.tp) / self.case.tp

    @cached_property
    def ratio(self) -> float:
        """Bytes of an element in full precision by those of an activation."""
        return self.case.wide / self.case.width


def product(t: Tape, s: Sizes, left: float, right: float, out: float) -> Block:
    """Allocate a product's result, after the wide copies that it may take."""
    if s.widening:
        t.meter.need(s.widening * left, s.widening * right, s.widening * out)
    block = t.block(out)
    if s.widening:
        t.meter.need(s.widening * out)
    return block


def linear(t: Tape, s: Sizes, x: Value, spec: LinearSpec) -> Value:
    """``layers.linear.linear``: at the entry of a tensor-parallel region (``column``), or within it."""
    outputs, inputs = spec.product(s.case.tp)
    bias = outputs * s.case.width if spec.bias else 0.0
    share = 1 / s.case.tp if spec.parallel == "none" and s.case.sequence_parallel else 1.0
    return matrix(t, s, x, inputs, outputs, bias=bias, entry=spec.parallel == "column", share=share)


def matrix(
    t: Tape, s: Sizes, x: Value, inputs: float, outputs: float, *, bias: float, entry: bool, share: float = 1.0
) -> Value:
    """A product with a matrix, which has no gradient where only adapters are trained. ``share``: of the tokens, those
    that this rank multiplies."""
    frozen = s.case.fine_tuning.enabled
    w, gathers, tokens = s.case.width, entry and s.case.sequence_parallel, s.tokens * share
    size_in, size_out, weight = tokens * inputs * w, tokens * outputs * w, inputs * outputs * w

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        full = None
        if not frozen:
            again = entry and s.case.engine.drops("layernorm")
            full = t.block(size_in) if again or gathers else saved[0]
        partial = product(t, s, size_out, weight, size_in)
        dx = t.block(size_in / s.case.tp) if gathers else partial
        if full is None:
            return [dx]
        if t.defers:
            t.defer(grad, full)
        else:
            t.meter.need(s.widening * size_out, s.widening * size_in)
        t.meter.need(bias)
        return [dx]

    gathered = t.block(size_in) if gathers else None
    out = product(t, s, size_in, weight, size_out)
    saved = [] if frozen else [saved_input(t, s, x.block, made_again=entry)]
    del gathered
    return t.note(out, [x], backward, saved)


def saved_input(t: Tape, s: Sizes, kept: Block, *, made_again: bool) -> Block:
    """What a product saves of its input: the input, in other programs' fp8 its 8-bit copy, or nothing where they make a
    norm's output again."""
    if made_again and s.case.engine.drops("layernorm"):
        return t.block(0.0)
    return t.block(kept.size / s.case.width) if s.case.dtype == "fp8" and s.case.fp8 == "none" else kept


def leave(t: Tape, s: Sizes, y: Value) -> Value:
    """Sum over tensor-parallel ranks at the end of a region (``dist.collectives``)."""
    if s.case.tp == 1:
        return y
    if not s.case.sequence_parallel:
        return t.note(t.block(y.size), [y], lambda grad, saved: [grad])
    size = y.size
    return t.note(t.block(size / s.case.tp), [y], lambda grad, saved: [t.block(size)])


def normalize(t: Tape, s: Sizes, x: Value, norm: NormSpec, residual: Value | None = None) -> tuple[Value, Value]:
    """Return (norm of x + residual, x + residual)."""
    total = x
    if residual is not None:
        total = t.note(t.block(x.size), [x, residual], lambda grad, saved: [grad, grad])
    rows = x.size / norm.size / s.case.width
    over_ranks = norm.split is not None and s.case.tp > 1  # a function of its own (layers.norm)
    if norm.kind == "rmsnorm" and s.torch and not over_ranks:
        return _torch_rms_norm(t, s, total), total
    size = x.size
    statistics = t.block(rows * s.case.wide * (1 if norm.kind == "rmsnorm" else 2))

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        return [t.block(size)]

    return t.note(t.block(size), [total], backward, [total.block, statistics]), total


def _torch_rms_norm(t: Tape, s: Sizes, x: Value) -> Value:
    """torch's composite ops in full precision: x · rsqrt(mean(x²) + eps) · weight."""
    size, wide = x.size, x.size * s.ratio
    if s.ratio > 1:
        x = t.note(t.block(wide), [x], lambda grad, saved: [t.block(size)])

    def of_squares(grad: Block, saved: list[Block]) -> list[Block | None]:
        t.meter.need(wide, wide, wide, wide)
        return [t.block(wide)]

    def of_product(grad: Block, saved: list[Block]) -> list[Block | None]:
        straight, scale = t.block(wide), t.block(0.0)
        t.meter.need(wide)
        return [straight, scale]

    def of_weighted(grad: Block, saved: list[Block]) -> list[Block | None]:
        t.meter.need(wide, wide)
        return [t.block(wide)]

    t.meter.need(wide)
    scale = t.note(t.block(0.0), [x], of_squares, [x.block])
    normed = t.note(t.block(wide), [x, scale], of_product, [x.block, scale.block])
    kept = [] if s.case.fine_tuning.enabled else [normed.block]  # for the weight's gradient
    out = t.note(t.block(wide), [normed], of_weighted, kept)
    return out if s.ratio == 1 else t.note(t.block(size), [out], lambda grad, saved: [t.block(wide)])


def drop(t: Tape, s: Sizes, x: Value) -> Value:
    """torch's dropout: the mask is drawn, then two products, by the mask and by the scale."""
    size, elements = x.size, x.size / s.case.width
    t.meter.need(elements * 2, elements * 2, elements * 2)
    keep = t.block(elements)
    mask = t.block(size)
    masked = t.note(t.block(size), [x], lambda grad, saved: [t.block(size)], [mask])
    out = t.note(t.block(size), [masked], lambda grad, saved: [t.block(size)])
    del keep  # the caller's, until here
    return out


def gelu(t: Tape, s: Sizes, x: Value, *, bias: bool) -> Value:
    size = x.size
    if s.torch and bias:
        x = t.note(t.block(size), [x], lambda grad, saved: [grad])
    return t.note(t.block(size), [x], lambda grad, saved: [t.block(size)], [x.block])


def gated(t: Tape, s: Sizes, x: Value, mlp: MLPSpec) -> Value:
    """A gated activation: one op, or two of torch's; GPT-OSS's makes parts and masks beside its gradient."""
    size = x.size / 2
    beside = (6 + 2 / s.case.width) * size if mlp.activation == "swiglu_clamped" else 0.0

    def of_both(grad: Block, saved: list[Block]) -> list[Block | None]:
        t.meter.need(2 * size, beside)
        return [t.block(2 * size)]

    if not mlp.keeps_gate(s.torch):
        return t.note(t.block(size), [x], of_both, [x.block])
    gate, up = t.split(x, lambda grad, saved: [t.block(2 * size)], 2)
    silu = t.note(t.block(size), [gate], lambda grad, saved: [t.block(size)], [gate.block])
    return t.note(
        t.block(size), [silu, up], lambda grad, saved: [t.block(size), t.block(size)], [silu.block, up.block]
    )
