"""The residual stream of a rank: which positions its rows are, hidden dropout, and the addition of a layer's branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_port.core.dist.positions import Positions, SequencePartition
from megatron_port.core.layers.fused import BiasDropoutAdd, BiasDropoutAddNorm, add_bias
from megatron_port.core.layers.step import StepSlot

if TYPE_CHECKING:
    from megatron_port.core.model.layers import Norm  # which is built with this stream


@dataclass(frozen=True)
class ResidualStream:
    """Dropout and addition on this rank's rows [seq(/tp), batch, width] of the residual stream."""

    partition: SequencePartition
    """Which positions of a sequence this rank holds."""
    step: StepSlot
    dropout: float
    """Probability while training."""
    width: int
    fused: BiasDropoutAdd | None
    """Provider of bias + dropout + addition; None: plain torch."""
    fused_norm: BiasDropoutAddNorm | None = None
    """Provider of the same with the norm that follows; None: one after the other."""
    multiplier: float = 1.0
    """Factor on each branch."""

    @property
    def dropout_now(self) -> float:
        """Probability in the pass at hand: 0 during evaluation."""
        return self.dropout if self.step.stream.enabled else 0.0

    def positions(self, rows: int) -> Positions:
        """Return the positions of this rank's ``rows`` rows."""
        partition = self.partition.divided(self.step.division)
        return partition.residual(partition.seq_length(rows * partition.pieces))

    def _mask_positions(self, rows: int) -> Positions:
        """Return the positions by which the masks of this rank's ``rows`` are drawn: any, in one run, where nothing is
        dropped. Generation's new tokens, too, are rows of no whole sequence."""
        return self.positions(rows) if self.dropout_now else Positions.contiguous(rows)

    def document_starts(self) -> torch.Tensor | None:
        """Return where the document of each of this rank's rows starts, int32 [rows, batch]; None: a sample is one."""
        starts = None if self.step.current is None else self.step.current.document_starts
        if starts is None:
            return None
        partition = self.partition.divided(self.step.division)
        return partition.residual(starts.shape[1]).take(starts.t())

    def drop(self, x: torch.Tensor, *, op: str) -> torch.Tensor:
        """Return ``x`` after dropout; ``op`` names the place in the model and keys the mask."""
        return self.step.stream.dropout(
            x, self.dropout_now, op=op, positions=self._mask_positions(x.shape[0]), width=self.width
        )

    def _scaled(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x * self.multiplier, None if bias is None else bias * self.multiplier

    def biased(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x + bias: a branch whose norm reads both."""
        return add_bias(x, bias)

    def bias_dropout_add(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, *, op: str
    ) -> torch.Tensor:
        """Return residual + dropout(multiplier · (x + bias))."""
        if self.multiplier != 1.0:
            x, bias = self._scaled(x, bias)
        p, fused = self.dropout_now, self.fused
        if bias is None and p == 0.0:
            return residual + x
        if fused is None:
            return residual + self.drop(add_bias(x, bias), op=op)
        positions, keys = self._mask_positions(x.shape[0]), self.step.stream.sample_keys(p)
        key, runs = self.step.stream.op_key(op), positions.runs
        rows = [run.length for run in runs]
        if bias is not None and self.step.division is not None:
            bias = bias.view_as(bias)  # autograd sums its runs, whose number differs from pass to pass, to one gradient
        split = ((x,), (residual,)) if len(runs) == 1 else (x.split(rows), residual.split(rows))
        parts = [  # one call per run: the kernel takes a single start
            fused(part, bias, rest, keys, op_key=key, p=p, seq_offset=run.start, width=self.width, width_offset=0)
            for run, part, rest in zip(runs, *split)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias_dropout_add_norm(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, norm: Norm, *, op: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm of the sum, sum) with the sum residual + dropout(multiplier · (x + bias))."""
        p, positions = self.dropout_now, self._mask_positions(x.shape[0])
        alone = bias is None and p == 0.0
        if not alone and (self.fused_norm is None or len(positions.runs) > 1):  # the kernel takes a single start
            return norm.fork(self.bias_dropout_add(x, bias, residual, op=op))
        if self.multiplier != 1.0:
            x, bias = self._scaled(x, bias)
        if alone:
            return norm.add(x, residual)
        branch_bias, fused = bias, self.fused_norm
        assert fused is not None
        keys, key = self.step.stream.sample_keys(p), self.step.stream.op_key(op)
        start, rms = positions.runs[0].start, norm.kind == "rmsnorm"

        def one_kernel(
            x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert residual is not None
            return fused(
                x, branch_bias, residual, keys, weight, bias, op_key=key, p=p, seq_offset=start, eps=eps, rms=rms
            )

        return norm.add(x, residual, by=one_kernel)
