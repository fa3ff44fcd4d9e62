"""Matrices in 8 bits, and the cache of a step's copies of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quantised:
    """A matrix in 8 bits: ``values`` [rows, columns] contiguous; ``values`` × ``inverse`` is the matrix."""

    values: Tensor
    inverse: Tensor
    """fp32 powers of two, [1, 1] or, with a scale for each row, [rows, 1]."""
    rowwise: bool

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.values.shape

    def transposed(self) -> Quantised:
        """The transposed matrix; only with one scale for the tensor."""
        assert not self.rowwise, "scales of rows are not scales of columns"
        return Quantised(self.values.t().contiguous(), self.inverse, False)


class QuantizedWeightCache:
    """Cache of a step's 8-bit copies of the weights; weights carry it as ``quantized_weight_cache``.

    It caches only inside :meth:`active`, while the engine changes no weight, so each copy is made once per step.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, str], Quantised] | None = None
        self._backward = False

    @contextmanager
    def active(self, *, backward: bool = True) -> Iterator[None]:
        """Cache copies until the context ends, then drop them. ``backward``: dgrad will be computed too."""
        self._copies, self._backward = {}, backward
        try:
            yield
        finally:
            self._copies = None

    def attach(self, weight: Tensor) -> None:
        """Let the products with a weight find this cache."""
        weight.quantized_weight_cache = self  # type: ignore[attr-defined]

    def get(self, weight: Tensor, name: str, make: Callable[[], Quantised]) -> Quantised:
        """Return the weight's copy called ``name``, made by ``make`` unless it is cached."""
        if self._copies is None:
            return make()
        key = (id(weight), name)
        if key not in self._copies:
            self._copies[key] = make()
        return self._copies[key]

    def pair(
        self, weight: Tensor, which: str, one: Callable[[], Quantised], both: Callable[[], tuple[Quantised, Quantised]]
    ) -> Quantised:
        """Return the weight's copy ``which`` ("rows" or "columns"); both are made at once if dgrad needs the other."""
        if self._copies is None or not self._backward:
            return self.get(weight, which, one)
        if (id(weight), which) not in self._copies:
            self._copies[id(weight), "rows"], self._copies[id(weight), "columns"] = both()
        return self._copies[id(weight), which]

    def bytes_held(self) -> int:
        """Bytes of the cached copies, without their scales."""
        return sum(copy.values.numel() for copy in (self._copies or {}).values())
