"""Low-rank factors of chosen linears: their ranks, from energy or a budget, and the reader of the factored model.

W [out, in] becomes B A with B [out, r] and A [r, in] from its singular value decomposition, half of each singular
value's root in either: of all products of rank r that is the nearest to W (Eckart and Young). Matrices that are in one
parameter (queries, keys and values; gate and up) are factored together. One matrix is in memory at a time, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_port.core.config.low_rank import factored_shapes
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.state import WEIGHT, StateReader
from megatron_port.core.errors import ConfigError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.shapes import parameter_shapes

Box = tuple[int, ...]
NAMES = {"qkv": "attention.qkv", "output": "attention.output", "up": "mlp.up", "down": "mlp.down"}
"""Name of a rank → that of the linear within a layer."""
TILE = 64
"""Multiple that matrix products of GPUs compute without waste."""


def with_ranks(model: ModelConfig, ranks: Mapping[str, int]) -> ModelConfig:
    """Return ``model`` with these linears factored. Raises ConfigError: a linear that it has not, or a rank too large.
    """
    shapes, out = factored_shapes(model), []
    for name, rank in ranks.items():
        if name not in shapes:
            out.append(f"--factor {name}: this model has {', '.join(shapes)}")
            continue
        rows, columns = shapes[name]
        most = rows * columns // (rows + columns)
        if not 0 < rank <= most:
            out.append(f"--factor {name}={rank}: the matrix is {rows} x {columns}, whose factors are smaller than it "
                       f"from rank 1 to {most}")
    if out:
        raise ConfigError(out)
    asked: dict[str, Any] = {f"{name}_rank": rank for name, rank in ranks.items()}
    return replace(model, **asked)


def ranks_by_budget(model: ModelConfig, names: tuple[str, ...], share: float) -> dict[str, int]:
    """Return the largest ranks whose factors have at most ``share`` of the elements of their matrices; those above
    4 x ``TILE`` are multiples of it."""
    ranks = {name: max(1, int(share * a * b) // (a + b)) for name, (a, b) in _shapes(model, names).items()}
    return {name: rank - rank % TILE if rank > 4 * TILE else rank for name, rank in ranks.items()}


def ranks_by_energy(
    model: ModelConfig, names: tuple[str, ...], share: float, read: StateReader,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, int]:
    """Return the least ranks with which every layer's matrix keeps ``share`` of the sum of its squared singular values.
    """
    out = dict.fromkeys(_shapes(model, names), 1)
    for weight, name in _weights(model, names).items():
        advance(weight)
        squares = torch.linalg.svdvals(_matrix(read, weight, parameter_shapes(model)[weight])).square()
        kept = squares.cumsum(0) / squares.sum()
        out[name] = max(out[name], int((kept < share - 1e-12).sum()) + 1)
    return out


def _shapes(model: ModelConfig, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    shapes = factored_shapes(model)
    unknown = [name for name in names if name not in shapes]
    if unknown:
        raise ConfigError(f"--factor {unknown[0]}: this model has {', '.join(shapes)}")
    return {name: shapes[name] for name in names or shapes}


def _weights(model: ModelConfig, names: tuple[str, ...]) -> dict[str, str]:
    """Canonical name of each weight of the linears ``names`` → the name of its rank."""
    by_linear = {linear: name for name, linear in NAMES.items() if name in _shapes(model, names)}
    return {
        f"layers.{i}.{spec.name}.weight": by_linear[spec.name]
        for i, layer in enumerate(model_spec(model).layers) for spec in layer.linears if spec.name in by_linear
    }


def _matrix(read: StateReader, name: str, shape: Box) -> torch.Tensor:
    """Return a whole weight as float64 [out, in]."""
    return read(name, WEIGHT, (0,) * len(shape), shape).double().flatten(0, -2)


def factors_of(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A [r, in], B [out, r]) of a float64 matrix [out, in]."""
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    root = values[:rank].sqrt()
    return root[:, None] * v[:rank], u[:, :rank] * root


class FactoredWeights:
    """A reader of ``model``, some of whose linears are factored, over the weights of the same model without factors."""

    def __init__(self, model: ModelConfig, read: StateReader) -> None:
        whole = without_factors(model)
        self._read, self._shapes = read, parameter_shapes(whole)
        by_name = _weights(whole, tuple(model.ranks))
        self._ranks = {weight: model.ranks[name] for weight, name in by_name.items()}
        self._low = {f"{weight.removesuffix('.weight')}_low.weight": weight for weight in by_name}
        self._last: tuple[str, torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor (``dist.state.StateReader``), float32 where it is a factor."""
        weight = self._low.get(name, name)
        if kind != WEIGHT or weight not in self._ranks:
            return self._read(name, kind, offset, shape, out=out)
        if self._last is None or self._last[0] != weight:
            self._last = None  # before the next takes its place in memory
            self._last = weight, *factors_of(_matrix(self._read, weight, self._shapes[weight]), self._ranks[weight])
        _, low, high = self._last
        whole = low if name in self._low else high.view(*self._shapes[weight][:-1], -1)
        return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))].float().contiguous()


def without_factors(model: ModelConfig) -> ModelConfig:
    """Return the model of whole matrices that computes the same."""
    return replace(model, qkv_rank=0, output_rank=0, up_rank=0, down_rank=0)


class MultipliedWeights:
    """A reader of whole matrices over the factors of ``model``: W = B A in float64, returned as float32."""

    def __init__(self, model: ModelConfig, read: StateReader) -> None:
        self._read, self._shapes = read, parameter_shapes(model)
        self._ranks = {
            weight: model.ranks[name] for weight, name in _weights(without_factors(model), tuple(model.ranks)).items()
        } if model.ranks else {}

    def __call__(
        self, name: str, kind: str, offset: Box, shape: Box, /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor (``dist.state.StateReader``)."""
        if kind != WEIGHT or name not in self._ranks:
            return self._read(name, kind, offset, shape, out=out)
        rank = self._ranks[name]
        high = self._read(name, WEIGHT, (*offset[:-1], 0), (*shape[:-1], rank))
        low = self._read(f"{name.removesuffix('.weight')}_low.weight", WEIGHT, (0, offset[-1]), (rank, shape[-1]))
        dtype = torch.promote_types(high.dtype, torch.float32)
        return (high.double() @ low.double()).to(dtype)
