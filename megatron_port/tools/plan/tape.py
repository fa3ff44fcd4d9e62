"""Memory of a forward and a backward pass, from shapes alone: an allocator that counts, and autograd's tape.

A pass is written once more as a program over blocks of memory, in the order of the module's own operations
(``plan.meter``). A block counts from its creation until nothing refers to it, as a tensor does; the tape holds what
autograd saves, and runs backward in reverse order with the gradients that wait to be added up. What a pass keeps, and
what it needs at its peak, follow from that without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from megatron_port.core.model.ops import Site


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
