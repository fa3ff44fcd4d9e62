"""Head and loss in chunks of tokens: the logits [tokens, vocabulary/tp] of a micro-batch never exist whole.

Forward, each chunk's logits are made, looked at and dropped. Backward they are made again, the gradient is written over
them, and the chunk's parts of dL/dx and dL/dW follow at once; the latter go into the engine's sum. What is kept
for that is the product's input, which is kept anyway, and two numbers per token. The price is one more product of the
head.

The gradient is not made in the forward pass, where its factor is not known in general (a pair's loss is no sum of its
tokens'; a mean over tokens may come later), and where the sum of dL/dW would be needed before the step's passes reduce
it. So a chunk is the head as it is, on fewer rows: every loss of tokens, any mask and any objective that is a function
of them goes with it. Sums over tensor-parallel ranks are made once for all chunks where the loss is the cross-entropy,
else in every chunk.

A split backward pass (zero-bubble schedules) computes dL/dW with dL/dx: to defer it would keep the logits, or make
them a third time.

The stage hands its result to the loss, which calls the head with it: only there are the labels known, and a unit's
weights are whole (ZeRO stage 3) where it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_port.core.dist.collectives import (
    all_gather_first,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron_port.core.layers.cross_entropy import losses_from, vocab_parallel_cross_entropy
from megatron_port.core.layers.fused import FirstOrderFunction, first_order
from megatron_port.core.layers.linear import PLAIN, WgradAccumulator
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.layers import Head
from megatron_port.core.model.spec import HeadSpec

PartLoss = Callable[[Tensor, slice], Any]
"""The losses [positions, batch] of the logits [positions, batch, columns] of a slice of positions; or several such
tensors, of which the first has a gradient."""


class ChunkLoss(Protocol):
    """A loss of tokens that sees the logits of one slice of positions after the other, twice."""

    def look(self, logits: Tensor, at: slice) -> None:
        """Take the logits [positions, batch, columns] of a slice; they are dropped afterwards."""

    def finish(self) -> tuple[Tensor, ...]:
        """Return the results of all tokens, each [seq, batch]; the first has a gradient."""

    def gradient(self, logits: Tensor, at: slice, grad: Tensor) -> Tensor:
        """Return the gradient of a slice's logits, which may be overwritten, given that of its losses."""


class CrossEntropyChunks:
    """The cross-entropy (``layers.cross_entropy``): what is summed over ranks is summed once, for all tokens."""

    def __init__(self, head: Head, labels: Tensor, z_loss: float) -> None:
        record = head.weight.record  # type: ignore[attr-defined]
        self.ops, self.group, self.labels, self.z_loss = head.cross_entropy, head.group, labels, z_loss
        self.columns = {"offset": record.offset[0], "extent": record.extent[0]}
        self.found: list[tuple[Tensor, Tensor, Tensor]] = []
        self.maximum = self.total = torch.empty(0)

    def look(self, logits: Tensor, at: slice) -> None:
        self.found.append(self.ops.statistics(logits, self.labels[at], **self.columns))

    def finish(self) -> tuple[Tensor, ...]:
        maximum, total, target = (torch.cat(parts) for parts in zip(*self.found))
        self.found.clear()
        loss, self.maximum, self.total = losses_from((maximum, total, target), self.group, self.z_loss)
        return (loss,)

    def gradient(self, logits: Tensor, at: slice, grad: Tensor) -> Tensor:
        self.ops.gradient_(
            logits, self.labels[at], self.maximum[at], self.total[at], grad.contiguous(), **self.columns
        )
        return logits


class AnyChunks:
    """A loss of which only its value and its gradient at given logits are known."""

    def __init__(self, loss: PartLoss) -> None:
        self.loss, self.found = loss, list[tuple[Tensor, ...]]()

    def look(self, logits: Tensor, at: slice) -> None:
        self.found.append(_as_tuple(self.loss(logits, at)))

    def finish(self) -> tuple[Tensor, ...]:
        out = tuple(torch.cat(parts) for parts in zip(*self.found))
        self.found.clear()
        return out

    def gradient(self, logits: Tensor, at: slice, grad: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = _as_tuple(self.loss(leaf, at))[0]
        found, = torch.autograd.grad(loss, leaf, grad)
        return found


def _as_tuple(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


class ChunkedHead(Head):
    """A head that gives losses and no logits, ``build.head_chunk`` tokens at a time (see the module).

    Called with a stage's result alone it is the head that it derives from.
    """

    defers = True

    def __init__(self, spec: HeadSpec, build: BuildContext, shared: nn.Parameter | None = None) -> None:
        super().__init__(spec, build, shared)
        self.chunk = build.head_chunk

    def forward(self, x: Tensor, loss: ChunkLoss | None = None) -> Any:
        """Return the logits; with ``loss``, its results (:meth:`ChunkLoss.finish`)."""
        y = self.product_input(x)
        return self.logits(y) if loss is None else self._in_chunks(y, loss)

    def logits_at(self, x: Tensor) -> Callable[[slice], Tensor]:
        """Return a function from a slice of positions to the logits of a stage's result there, without a gradient."""
        with torch.no_grad():
            y = self.product_input(x)
            whole = all_gather_first(y, self.group) if self.sequence_parallel else y

        def made(at: slice) -> Tensor:
            with torch.no_grad():
                return self.capped(self.product(whole[at]))

        return made

    def losses_of(self, logits: Tensor, loss: PartLoss) -> Any:
        """Return ``loss`` of all tokens, which is called for each chunk in a forward and again in a backward pass."""
        out = self(logits, AnyChunks(loss))
        return out[0] if len(out) == 1 else out

    def token_losses(self, logits: Tensor, labels: Tensor, *, z_loss: float = 0.0) -> Tensor:
        """Return the loss of each token [batch, seq]; see ``Head.token_losses``. ``logits``: a stage's result."""
        found: Tensor = self(logits, self._loss_of(labels, z_loss))[0]
        return found.t()

    def further_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token [batch, seq] from normed hidden states [seq(/tp), batch, hidden]."""
        return self._in_chunks(self.scaled(hidden), self._loss_of(labels, 0.0))[0].t()

    def _loss_of(self, labels: Tensor, z_loss: float) -> ChunkLoss:
        """Return the loss of logits for ``labels`` [batch, seq]: the run's in training, else the cross-entropy."""
        labels, record = labels.t().contiguous(), self.weight.record  # type: ignore[attr-defined]
        if not self.training or self.loss is vocab_parallel_cross_entropy:
            return CrossEntropyChunks(self, labels, z_loss if self.training else 0.0)
        return AnyChunks(lambda logits, at: self.loss(
            logits, labels[at], offset=record.offset[0], extent=record.extent[0], group=self.group,
            ops=self.cross_entropy,
        ))

    def product(self, y: Tensor) -> Tensor:
        """Return the logits of rows of the product's input, before they are capped, without a gradient."""
        return PLAIN.forward(y, self.weight.detach(), self.weight.detach(), self.bias)[0]

    def slices(self, whole: Tensor) -> Iterator[slice]:
        """Yield the slices of positions of [seq, batch, …], of ``chunk`` tokens or, where a position has more, one."""
        step = max(1, self.chunk // whole.shape[1])
        for start in range(0, whole.shape[0], step):
            yield slice(start, min(start + step, whole.shape[0]))

    def _in_chunks(self, y: Tensor, loss: ChunkLoss) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = _ChunkedLosses.apply(y, self.bias, self.weight, self, loss)
        return out


class _ChunkedLosses(FirstOrderFunction):
    """The entry of a tensor-parallel region, its product and a loss of its result, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor | None, weight: Tensor, head: ChunkedHead, loss: ChunkLoss
    ) -> tuple[Tensor, ...]:
        whole = all_gather_first(y, head.group) if head.sequence_parallel else y
        for at in head.slices(whole):
            loss.look(head.capped(head.product(whole[at])), at)
        out = loss.finish()
        ctx.save_for_backward(y, weight)
        ctx.head, ctx.loss, ctx.weight = head, loss, weight  # a saved tensor may lack the parameter's attributes
        ctx.mark_non_differentiable(*out[1:])
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, *unused: Tensor | None) -> Any:
        (y, _), head, weight, needs = ctx.saved_tensors, ctx.head, ctx.weight, ctx.needs_input_grad
        whole = start_all_gather(y, head.group).take() if head.sequence_parallel else y
        passed = _Backward(head, ctx.loss, whole, grad)
        passed.dx = torch.empty_like(whole) if needs[0] else None
        passed.db = torch.zeros_like(weight[:, 0], dtype=grad.dtype) if needs[1] else None
        dw = passed.with_weight(weight, wanted=needs[2])
        dx, db = passed.dx, passed.db
        if dx is not None:
            dx = (start_reduce_scatter if head.sequence_parallel else start_all_reduce)(dx, head.group).take()
        return dx, db, dw, None, None


class _Backward:
    """One backward pass: ``dx`` [seq, batch, hidden], this rank's part of a sum, and ``db`` [columns], each None where
    it is not wanted."""

    def __init__(self, head: ChunkedHead, loss: ChunkLoss, whole: Tensor, grad: Tensor) -> None:
        self.head, self.loss, self.whole, self.grad = head, loss, whole.detach(), grad
        self.dx: Tensor | None = None
        self.db: Tensor | None = None

    def with_weight(self, weight: Tensor, *, wanted: bool) -> Tensor | None:
        """Run, and give the weight's gradient, if it is ``wanted``, to its accumulator at once; return it where the
        weight has none."""
        accumulator: WgradAccumulator | None = getattr(weight, "wgrad_accumulator", None)
        if not wanted:
            self.run(None)
            return None
        if accumulator is None:
            total = torch.zeros_like(weight, dtype=self.grad.dtype)
            self.run(total)
            return total.to(weight.dtype)
        deferred, accumulator.deferred = accumulator.deferred, None
        try:
            accumulator.add(weight, self.run, overwrites=True)
        finally:
            accumulator.deferred = deferred
        return None

    def run(self, main_grad: Tensor | None, *, first: bool = False) -> None:
        """Take the chunks' gradients; ``first``: write over what ``main_grad`` [columns, hidden] holds."""
        for at in self.head.slices(self.whole):
            self._take(at, main_grad, first)
            first = False

    def _take(self, at: slice, main_grad: Tensor | None, first: bool) -> None:
        head, x = self.head, self.whole[at]
        grad = self._of_logits(x, at).flatten(0, -2)
        if self.dx is not None:
            self.dx[at] = PLAIN.dgrad(grad, head.weight, head.weight.detach()).view(x.shape)
        if self.db is not None:
            self.db += grad.sum(dim=0, dtype=self.db.dtype)
        if main_grad is not None:
            PLAIN.wgrad_accumulate(main_grad, grad, x.flatten(0, -2), None, first=first)

    def _of_logits(self, x: Tensor, at: slice) -> Tensor:
        """Return the gradient of the product's result, before the cap."""
        product, grad = self.head.product(x), self.grad[at]
        if self.head.softcap == 0.0:
            return self.loss.gradient(product, at, grad)
        with torch.enable_grad():
            capped = self.head.capped(product.requires_grad_())
        found, = torch.autograd.grad(capped, product, self.loss.gradient(capped.detach(), at, grad))
        return found
