"""Memory of the operations of which units are made: products, collectives, norms, dropout (for ``plan.operations``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.ops import Site
from megatron_port.core.model.spec import LayerSpec, LinearSpec, MLPSpec, NormSpec
from megatron_port.ext.mixers.scaled_mlp_spec import ScaledMLPSpec
from megatron_port.ext.weights.adapter_spec import AdapterSpec, adapter_spec, layer_adapters, parts_of
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.rates import Rates

# Memory of a forward and a backward pass, from shapes alone: an allocator that counts, and autograd's tape.
#
# A pass is written once more as a program over blocks of memory, in the order of the module's own operations
# (``plan.meter``). A block counts from its creation until nothing refers to it, as a tensor does; the tape holds what
# autograd saves, and runs backward in reverse order with the gradients that wait to be added up. What a pass keeps, and
# what it needs at its peak, follow from that without torch.

class Meter:
    """Counter of the bytes in use, and of the most since :meth:`mark`."""

    def __init__(self) -> None:
        self.now = self.peak = 0.0

    def mark(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def need(self, *sizes: float) -> None:
        """Count memory that an operation allocates and frees."""
        self.peak = max(self.peak, self.now + sum(sizes))


class Block:
    """Memory of a tensor and its views; freed with the last reference to it."""

    __slots__ = ("meter", "readers", "site", "size")

    def __init__(self, meter: Meter, size: float, site: Site = "input") -> None:
        self.meter, self.size, self.site = meter, size, site
        self.readers = 0
        """Who will still read it: no gradient may be added to it in place."""
        meter.now += size
        meter.peak = max(meter.peak, meter.now)

    def __del__(self) -> None:
        self.meter.now -= self.size


_KEYS = count()
_NOBODY = -1
"""In place of the key of a constant, whose gradient nobody asks for."""


class Value:
    """Tensor of a forward pass; views of it are the same value. ``constant``: it has no gradient, as nothing that is
    trained lies before it."""

    __slots__ = ("block", "constant", "key")

    def __init__(self, block: Block, *, constant: bool = False) -> None:
        self.block, self.constant, self.key = block, constant, next(_KEYS)

    @property
    def size(self) -> float:
        """Bytes."""
        return self.block.size


Backward = Callable[[Block, list[Block]], "Sequence[Block | None]"]
"""(gradient of the output, what was saved) → gradients of the inputs. It may capture sizes, never blocks."""
Program = Callable[..., Value]
"""(tape, *values) → value: a part of a forward pass."""


@dataclass(eq=False)
class _Operation:
    output: int
    inputs: tuple[int, ...]
    saved: list[Block]
    saves: int
    backward: Backward
    inner: _Inner | None = None
    others: tuple[int, ...] = ()
    """Further outputs, whose gradients wait for that of the first."""


@dataclass(frozen=True)
class _Inner:
    """Operations that are computed again."""

    tape: Tape
    program: Program
    starts: list[int]
    end: int
    made_again: tuple[float, ...] = ()
    """Bytes of the inputs, where they are not kept but made once more when they are needed."""


def _unused(grad: Block, saved: list[Block]) -> list[Block | None]:
    raise AssertionError("a recomputed program has a tape of its own")


class _AllSaved(Exception):
    """A pass that is computed again has saved all that is needed."""


class Tape:
    """Operations of a forward pass, which :meth:`backward` takes from the end.

    Args:
        keeps: operations save what their backward passes read; else ``again`` computes it once more (recompute).
        defers: products of weight gradients are left for later, and hold what they read in ``deferred``.
    """

    def __init__(self, meter: Meter, *, keeps: bool = True, defers: bool = False) -> None:
        self.meter, self.keeps, self.defers = meter, keeps, defers
        self.deferred: list[Block] = []
        self.site: Site = "input"
        """Of the operation that runs: blocks are made under it."""
        self._operations: list[_Operation] = []
        self._pending: dict[int, Block] = {}
        self._expected = -1

    def block(self, size: float) -> Block:
        """Allocate ``size`` bytes."""
        return Block(self.meter, size, self.site)

    def kept_blocks(self) -> list[Block]:
        """Return the blocks that operations have saved, each once."""
        return list({id(block): block for op in self._operations for block in op.saved}.values())

    def defer(self, *blocks: Block) -> None:
        """Hold what a deferred product reads."""
        for block in blocks:
            block.readers += 1
        self.deferred += blocks

    def note(
        self, out: Block, inputs: Sequence[Value], backward: Backward, saves: Sequence[Block] = (), *,
        trains: bool = False,
    ) -> Value:
        """Note an operation with its result in ``out`` and return that as a value. Of constants it makes a constant and
        is not noted, unless it ``trains`` something itself."""
        value = Value(out, constant=not trains and all(v.constant for v in inputs))
        if value.constant:
            return value
        saved = list(saves) if self.keeps else []
        for block in saved:
            block.readers += 1
        keys = tuple(_NOBODY if v.constant else v.key for v in inputs)
        self._operations.append(_Operation(value.key, keys, saved, len(saves), backward))
        if self._expected >= 0 and saves:
            self._expected -= len(saves)
            if self._expected <= 0:
                raise _AllSaved
        return value

    def split(self, x: Value, backward: Backward, parts: int) -> list[Value]:
        """Note a split of ``x`` into views, whose gradients ``backward`` puts together."""
        first, *others = (
            self.note(x.block, [x], backward), *(Value(x.block, constant=x.constant) for _ in range(parts - 1))
        )
        if not x.constant:
            self._operations[-1].others = tuple(value.key for value in others)
        return [first, *others]

    def checkpoint(self, program: Program, *inputs: Value, made_again: bool = False) -> Value:
        """Run a program that keeps its inputs alone and is run again in the backward pass, as far as is needed.

        ``made_again``: what is in front of it makes the inputs once more, so that not even they are kept.
        """
        inner = Tape(self.meter, keeps=False, defers=self.defers)
        inner.deferred = self.deferred
        starts = [Value(v.block, constant=v.constant) for v in inputs]
        end = program(inner, *starts)
        kept = [self.block(0.0) if made_again else v.block for v in inputs]
        out = self.note(end.block, inputs, _unused, kept, trains=True)
        sizes = tuple(v.size for v in inputs) if made_again else ()
        self._operations[-1].inner = _Inner(inner, program, [v.key for v in starts], end.key, sizes)
        return out

    def _again(self, program: Program, inputs: Sequence[tuple[Block, bool]]) -> None:
        """Run ``program`` once more, and give what it saves to the operations of the first run. ``inputs``: with
        whether they are constant."""
        again = Tape(self.meter)
        again._expected = sum(op.saves for op in self._operations)
        with suppress(_AllSaved):
            program(again, *(Value(block, constant=constant) for block, constant in inputs))
        for op, copy in zip(self._operations, again._operations):
            op.saved = copy.saved

    def __len__(self) -> int:
        """Operations that have not run backward."""
        return len(self._operations)

    def seed(self, end: Value, gradient: Block) -> None:
        """Set the gradient of the pass's result."""
        self._pending[end.key] = gradient

    def run(self, *, down_to: int = 0, recompute: Callable[[], None] | None = None) -> None:
        """Run the operations from the last backward, all but the first ``down_to``; ``recompute``: called before the
        first that reads."""
        while len(self._operations) > down_to:
            op = self._operations[-1]
            if recompute is not None and op.saves:
                recompute()
                recompute = None
            self._operations.pop()
            results = self._results(op) if op.output in self._pending else []
            while op.saved:
                op.saved.pop().readers -= 1
            for key in op.inputs:
                self._add(key, results.pop(0) if results else None)

    def _results(self, op: _Operation) -> list[Block | None]:
        """Return the gradients of an operation's inputs; that of its output is gone then."""
        if op.inner is None:
            waiting = [self._pending.pop(key, None) for key in op.others]
            found = list(op.backward(self._pending.pop(op.output), op.saved))
            del waiting
            return found
        inner, program = op.inner.tape, op.inner.program
        blocks = list(map(self.block, op.inner.made_again)) or op.saved
        inputs = [(block, key == _NOBODY) for block, key in zip(blocks, op.inputs)]
        inner._pending[op.inner.end] = self._pending.pop(op.output)
        inner.run(recompute=lambda: inner._again(program, inputs))
        return [inner._pending.pop(key, None) for key in op.inner.starts]

    def _add(self, key: int, new: Block | None) -> None:
        """Add a gradient to those of the same value, in place where nobody else reads it."""
        old = self._pending.get(key)
        if new is None or old is None:
            if new is not None and key != _NOBODY:
                self._pending[key] = new
            return
        shared = sum(block is old for block in self._pending.values()) > 1
        if shared or old.readers:
            self._pending[key] = self.block(old.size)


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
    over_ranks = norm.split is not None and s.case.tp > 1  # a function of its own (mixers.projection_norm)
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


def gelu(t: Tape, s: Sizes, x: Value, activation: str, *, bias: bool) -> Value:
    """An activation without a gate; relu2 keeps no sum with its bias, whatever the provider."""
    size = x.size
    if s.torch and bias and activation != "relu2":
        x = t.note(t.block(size), [x], lambda grad, saved: [grad])
    return t.note(t.block(size), [x], lambda grad, saved: [t.block(size)], [x.block])


def gated(t: Tape, s: Sizes, x: Value, mlp: MLPSpec) -> Value:
    """A gated activation: one op, or two of torch's; GPT-OSS's makes parts and masks beside its gradient."""
    size = x.size / 2
    beside = (6 + 2 / s.case.width) * size if mlp.activation == "swiglu_clamped" else 0.0
    beside = 6 * size if isinstance(mlp, ScaledMLPSpec) else beside

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


# What low-rank adapters add to a layer's passes on a rank: memory of the adapted products, and their seconds.

def rank_of(spec: AdapterSpec) -> int:
    """Return the rows of the A's of a linear's adapters together."""
    return spec.rank * len(spec.adapted)


def tuned_linear(t: Tape, s: Sizes, x: Value, linear: LinearSpec) -> Value:
    """A product with a frozen weight, beside which there may be adapters (``weights.adapters``)."""
    w, (outputs, inputs) = s.case.width, linear.product(s.case.tp)
    spec = adapter_spec(linear, s.case.fine_tuning)
    gathers = linear.parallel == "column" and s.case.sequence_parallel
    tokens = s.tokens / s.case.tp if linear.parallel == "none" and s.case.sequence_parallel else s.tokens
    size_in, size_out, weight = tokens * inputs * w, tokens * outputs * w, inputs * outputs * w
    rank = 0 if spec is None else rank_of(spec)
    low, drops = tokens * rank * w, s.case.fine_tuning.dropout > 0 and spec is not None
    constant = x.constant

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        full = t.block(size_in) if gathers and rank else None
        d_low = t.block(low)
        if constant:
            return [None]
        partial = product(t, s, size_out, weight, size_in)
        if rank:
            t.meter.need(size_in, *((size_in, size_in) if drops else ()))  # the second summand, dropped elements
        dx = t.block(size_in / s.case.tp) if gathers else partial
        del full, d_low
        return [dx]

    full = t.block(size_in) if gathers else None
    out = product(t, s, size_in, weight, size_out)
    kept: list[Block] = []
    if spec is not None:
        if drops:
            t.meter.need(size_in, size_in)
        kept = [x.block, t.block(low)]
        if len(parts_of(linear)) > 1:  # A's one below the other, B's in their rows and columns
            kept += [t.block(rank * inputs * w), t.block(rank * outputs * w)]
        t.meter.need(size_out)
    y = t.note(out, [x], backward, kept, trains=spec is not None)
    del full
    if spec is None or not spec.with_magnitude:
        return y
    return t.note(t.block(size_out), [y], lambda grad, saved: [t.block(size_out)], [y.block])


def enter(t: Tape, s: Sizes, x: Value, spec: LinearSpec) -> Value:
    """A product at the beginning of a tensor-parallel region, of one matrix or of two factors."""
    for factor in spec.factors:
        x = (tuned_linear if s.case.fine_tuning.enabled else linear)(t, s, x, factor)
    return x


def leave_by(t: Tape, s: Sizes, x: Value, spec: LinearSpec) -> Value:
    """A product at the end of a region and its sum over ranks, behind which the second of two factors follows."""
    low, *high = spec.factors
    y = leave(t, s, (tuned_linear if s.case.fine_tuning.enabled else linear)(t, s, x, low))
    return linear(t, s, y, high[0]) if high else y


def adapter_seconds(case: Case, layer: LayerSpec, rates: Rates, tokens: float) -> tuple[float, float]:
    """Return the seconds of a forward and a backward of a layer's adapters."""
    forward = backward = 0.0
    for spec in layer_adapters(layer, case.fine_tuning):
        outputs, inputs = spec.linear.product(case.tp)
        rank, w = rank_of(spec), case.width
        forward += rates.product(tokens, rank, inputs, width=w) + rates.product(tokens, outputs, rank, width=w)
        forward += rates.stream(3 * tokens * outputs * w)  # added to the product
        backward += rates.product(tokens, rank, outputs, width=w) + rates.product(tokens, inputs, rank, width=w)
        backward += rates.product(rank, inputs, tokens, width=w) + rates.product(outputs, rank, tokens, width=w)
        backward += rates.stream(3 * tokens * inputs * w)
        if spec.with_magnitude:  # the rows' lengths, and every output scaled
            forward += rates.stream((2 * tokens * outputs + outputs * inputs) * w, 2)
            backward += rates.stream(4 * tokens * outputs * w, 2)
    return forward, backward
