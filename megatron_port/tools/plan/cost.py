"""Seconds of a pass through part of a model, by cause."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cost:
    """Seconds of a forward and of a backward: arithmetic and memory apart from communication within a stage."""

    forward: float = 0.0
    backward: float = 0.0
    """With what recompute adds."""
    forward_tensor: float = 0.0
    """The part of tensor-parallel collectives that compute does not hide."""
    backward_tensor: float = 0.0
    forward_exchange: float = 0.0
    """The part of all-to-all between expert-parallel ranks that compute does not hide."""
    backward_exchange: float = 0.0
    forward_context: float = 0.0
    """The part of context-parallel exchanges that compute does not hide."""
    backward_context: float = 0.0
    fillable: float = 0.0
    """The part of ``forward_exchange`` with rows on their way, beside which weight passes may run."""
    forward_starts: float = 0.0
    """Seconds in which the host starts the operations of the forward pass."""
    backward_starts: float = 0.0
    forward_host: float = 0.0
    """Seconds that the forward pass waits for the host: see :meth:`with_host`."""
    backward_host: float = 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """All of them."""
        return (
            self.forward, self.backward, self.forward_tensor, self.backward_tensor, self.forward_exchange,
            self.backward_exchange, self.forward_context, self.backward_context, self.fillable,
            self.forward_starts, self.backward_starts, self.forward_host, self.backward_host,
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(mine + theirs for mine, theirs in zip(self.parts, other.parts)))

    def times(self, count: float) -> Cost:
        """Return the cost ``count`` times."""
        return Cost(*(seconds * count for seconds in self.parts))

    @property
    def forward_alone(self) -> Cost:
        """This forward pass without a backward one."""
        return Cost(
            forward=self.forward, forward_tensor=self.forward_tensor, forward_exchange=self.forward_exchange,
            forward_context=self.forward_context, forward_starts=self.forward_starts, forward_host=self.forward_host,
        )

    @property
    def passes(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass, communication included."""
        return (
            self.forward + self.forward_tensor + self.forward_exchange + self.forward_context + self.forward_host,
            self.backward + self.backward_tensor + self.backward_exchange + self.backward_context + self.backward_host,
        )

    def with_host(self, *, is_device: bool = False) -> Cost:
        """This pass no faster than the host starts it: the host runs ahead within a pass, so whole passes are compared.

        ``is_device``: the host computes as well, and starting operations adds to that.
        """
        if is_device:
            return replace(self, forward_host=self.forward_starts, backward_host=self.backward_starts)
        forward, backward = self.passes
        return replace(
            self, forward_host=max(self.forward_starts - forward, 0.0),
            backward_host=max(self.backward_starts - backward, 0.0),
        )
