"""Gated short convolution, as LFM2 has it: the mixer ``short_conv``.

Three rows a channel, B, C and x: the result is C times the convolution of B x. There is no recurrence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_port.core.config.model import ModelConfig
from megatron_port.ext.mixers.recurrent_spec import RecurrentKind, RecurrentSpec, output, projection, sizes_of

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_port.ext.mixers.recurrent_spec import Norm, Rows


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """A unit is some channels: their B, their C, their x."""

    @property
    def scratch(self) -> tuple[float, float]:
        channels = self.units * self.convolved
        return 4 * channels, 3 * channels

    @property
    def passed(self) -> tuple[float, float, float]:
        """Products, which the convolution reads, in fp32 or fp64."""
        return 0.0, (self.kernel - 1) * self.units * self.convolved, 0.0

    def inputs(self, rows: Tensor, wide: Any) -> tuple[Tensor, Tensor]:
        before, after, x = rows.chunk(3, dim=-1)
        return before.to(wide) * x.to(wide), after

    def operands(self, rows: Rows, own: Mapping[str, Tensor]) -> None:
        return None

    def result(self, mixed: Tensor | None, rows: Rows, own: Mapping[str, Tensor], norm: Norm) -> Tensor:
        return (rows.plain * rows.convolved).flatten(-2)


def short_conv(model: ModelConfig, index: int) -> ShortConvSpec:
    """Return the mixer of a layer (from 0)."""
    r, hidden = sizes_of(model), model.hidden_size
    channels, bias = hidden // r.heads, r.convolution_bias
    return ShortConvSpec(
        units=r.heads, convolved=channels, plain=channels, kernel=r.kernel, segment=r.segment, convolution_bias=bias,
        packed=projection(model, 3 * (channels,), r.heads, bias=bias), output=output(model, hidden, bias=bias),
    )


def _faults(model: ModelConfig) -> Iterator[str]:
    heads = sizes_of(model).heads
    if model.hidden_size % heads:
        yield (f"model.hidden_size {model.hidden_size} does not divide by model.recurrent.heads {heads}, into which "
               "model.mixer 'short_conv' groups its channels; set heads to a divisor")


KIND = RecurrentKind(short_conv, reads=frozenset({"heads", "kernel", "segment", "convolution_bias"}), faults=_faults)
