"""Program of a layer: its operations (``model.ops``) as calls, made once and run in each forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn

from megatron_port.core.model.ops import INPUT, Op, Site, last_uses

Values = dict[str, Any]
"""Values by name, each a tensor or a tuple of tensors."""
Watch = Callable[[str, Any], None]
"""(name of a value, the value): called when an operation of a forward pass has made it."""


class Tape(Protocol):
    """Runs a layer's operations and decides what autograd saves of each (``memory.site_tape.SiteTape``)."""

    def run(self, site: Site, function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        """Return ``function(*inputs)``, of one site."""

    def run_fused(
        self, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], made_by: Callable[..., Any]
    ) -> tuple[torch.Tensor, ...]:
        """Return ``function(*inputs)``, whose results belong to several sites; ``made_by(*results)``: how each is."""


@dataclass(frozen=True)
class OpCall:
    """Call of one operation, or of two that one kernel may compute. Modules are looked up by path at each pass, so that
    a copy of the layer runs its own and a replaced module is seen."""

    op: Op

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of its arguments."""
        return self.op.reads

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of its results."""
        return self.op.writes

    @property
    def holds(self) -> tuple[str, ...]:
        """Names of values that it keeps alive until it has run."""
        return self.op.holds

    @property
    def path(self) -> str:
        """Dotted path from the layer to the callable."""
        return self.op.run

    def on_tape(self, layer: nn.Module, tape: Tape, inputs: Sequence[torch.Tensor]) -> Any:
        """Run the operation on ``inputs`` under the tape's decision for its site; return its results."""
        return tape.run(self.op.site, attrgetter(self.op.run)(layer), *inputs)


class NormCall(OpCall):
    """A norm of the residual stream, which also returns the stream: one kernel then adds the stream's two gradients."""

    @property
    def path(self) -> str:
        return f"{self.op.run}.fork"

    def on_tape(self, layer: nn.Module, tape: Tape, inputs: Sequence[torch.Tensor]) -> Any:
        norm, (x,), site = attrgetter(self.op.run)(layer), inputs, self.op.site
        if not norm.fuses_add:  # torch's norm returns x itself
            return tape.run(site, norm, x), x
        return tape.run_fused(norm.fork, (x,), lambda y, same: ((site, norm, (x,)), None))


@dataclass(frozen=True)
class AddNormCall(OpCall):
    """The addition ``op`` and the norm of the sum, which one kernel may compute."""

    norm: Op

    @property
    def writes(self) -> tuple[str, ...]:
        return self.norm.writes

    @property
    def holds(self) -> tuple[str, ...]:
        return (*self.op.holds, *self.norm.holds)

    @property
    def path(self) -> str:
        # The layer has a method for the two, e.g. ``add_attention_norm2``.
        return f"{self.op.run}_{self.norm.run}"

    def on_tape(self, layer: nn.Module, tape: Tape, inputs: Sequence[torch.Tensor]) -> Any:
        norm, add, both = (attrgetter(path)(layer) for path in (self.norm.run, self.op.run, self.path))
        if not norm.fuses_add:
            x = tape.run(self.op.site, add, *inputs)
            return tape.run(self.norm.site, norm, x), x
        arguments = tuple(inputs)
        x, y = tape.run_fused(
            lambda *given: both(*given)[::-1], arguments,
            lambda x, y: ((self.op.site, add, arguments), (self.norm.site, norm, (x,))),
        )
        return y, x


class Program:
    """The calls of a layer's operations, and the values that are freed after each."""

    def __init__(self, ops: Iterable[Op]) -> None:
        calls: list[OpCall] = []
        for op in ops:
            before = calls[-1].op if calls else None
            # An addition and the norm of its sum are one call: a provider may have one kernel for both.
            if op.kind != "norm":
                calls.append(OpCall(op))
            elif before is not None and before.kind in ("add", "biased add") and before.writes == op.reads:
                calls[-1] = AddNormCall(before, op)
            else:
                calls.append(NormCall(op))
        self._calls = tuple(
            (c, attrgetter(c.path), c.reads, c.writes, len(c.writes) == 1, dead)
            for c, dead in zip(calls, last_uses(calls))
        )

    def run(
        self, layer: nn.Module, x: torch.Tensor, watch: Watch | None = None, *, tape: Tape | None = None
    ) -> torch.Tensor:
        """Return the layer's output for x [seq(/tp), batch, hidden]; show each to ``watch``; ``tape`` runs all."""
        values: Values = {INPUT: x}
        for call, find, reads, writes, single, dead in self._calls:  # with no further call of Python's for each
            given: list[torch.Tensor] = []
            for name in reads:
                value = values[name]
                given += value if type(value) is tuple else (value,)
            out = find(layer)(*given) if tape is None else call.on_tape(layer, tape, given)
            for name, value in zip(writes, (out,) if single else out, strict=True):
                values[name] = value
                if watch is not None:
                    watch(name, value)
            for name in dead:
                del values[name]
            del given, value, out  # else they would live until the next operation has run
        return _result(values)


def _result(values: Values) -> torch.Tensor:
    (out,) = values.values()
    assert isinstance(out, torch.Tensor)
    return out
