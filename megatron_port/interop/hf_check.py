"""Do transformers' model of an exported folder and ours of the checkpoint compute the same logits?

Both run in fp32 on the same random tokens, layer by layer: at any time a process holds the weights of one layer (here)
or of one module (there). All matrices and biases are multiplied by 5 first. At the usual 0.02 of fresh weights even a
wrong activation changes the logits by 1e-5 only, which looks like rounding; five times that shows it. A trained model
may be so sharp that rounding alone moves its scaled logits by more than the tolerance: that is measured, by our model
in fp64, and the scale is then lowered to 2 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_port.backend.providers import torch_providers
from megatron_port.checkpoint.reader import Checkpoint
from megatron_port.config.schema import LayoutConfig, ModelConfig
from megatron_port.engine.module import read_local
from megatron_port.errors import CheckpointError, EnvironmentFault
from megatron_port.interop.hf_theirs import norm_weights, their_logits
from megatron_port.model.build import BuildContext
from megatron_port.model.decoder_spec import model_spec
from megatron_port.model.layers import Embedding, Head, TransformerLayer
from megatron_port.model.shapes import LAST_STEP
from megatron_port.parallel.buffers import recorded_buffers
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import record_of
from megatron_port.parallel.state import BUFFER, StateReader

TOLERANCE = 1e-6
SCALES = (5.0, 2.0, 1.0)
SAMPLES, LENGTH = 2, 48


@dataclass(frozen=True)
class Agreement:
    """Result of the check: ``deviation`` is max|Δ| ÷ max|logit|."""

    deviation: float
    tolerance: float
    scale: float
    rounding: float
    """The same of our model in fp32 against fp64."""
    version: str
    """Version of transformers."""

    def line(self) -> str:
        """For the console."""
        return (
            f"logits against transformers {self.version}: max|Δ| / max|logit| = {self.deviation:.1e} "
            f"(tolerance {self.tolerance:.1e}, weights × {self.scale:g}, fp32)"
        )

    def card(self) -> str:
        """For the model card."""
        return (
            f"The logits of this folder in transformers {self.version} and of the checkpoint in megatron_port differ "
            f"by max|Δ| ÷ max|logit| = **{self.deviation:.2e}** (tolerance {self.tolerance:.1e}): {SAMPLES} × {LENGTH} "
            f"random tokens at most, fp32, weights × {self.scale:g}. Rounding alone (fp32 against fp64): "
            f"{self.rounding:.2e}."
        )


def deviation(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| ÷ max|b|; NaN where either is not finite."""
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().max())


def check_export(checkpoint: Checkpoint, model: ModelConfig, folder: Path, *, dtype: torch.dtype) -> Agreement:
    """Run both models. ``dtype``: of the exported weights; ours are rounded to it too.

    Raises:
        CheckpointError: the logits differ by more than the tolerance.
        EnvironmentFault: transformers is not installed.
    """
    transformers = import_transformers()
    generator = torch.Generator().manual_seed(0)
    length = min(LENGTH, model.seq_length)
    tokens = torch.randint(0, model.vocab_size, (SAMPLES, length), generator=generator)

    def rounded(
        name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return checkpoint.read(name, kind, offset, shape).to(torch.float32 if kind == BUFFER else dtype)

    for scale in SCALES:
        ours = our_logits(rounded, model, tokens, scale=scale)
        rounding = deviation(ours, our_logits(rounded, model, tokens, scale=scale, dtype=torch.float64))
        if rounding <= 0.7 * TOLERANCE:  # the two models round each in its own order: together at most 1.4 times that
            break
    theirs = their_logits(transformers, folder, tokens, scale=scale)
    tolerance = TOLERANCE if scale > SCALES[-1] else max(TOLERANCE, 2 * rounding)
    found = Agreement(deviation(ours, theirs), tolerance, scale, rounding, transformers.__version__)
    if not found.deviation <= tolerance:  # NaN as well
        raise CheckpointError(
            f"{folder}: transformers' logits differ from ours by max|Δ| / max|logit| = {found.deviation:.2e}, above "
            f"{tolerance:.1e} (fp32, weights × {scale:g}; rounding alone is {rounding:.1e}). Nothing was exported"
        )
    return found


def import_transformers() -> Any:
    """The package. Raises EnvironmentFault where it is missing or broken."""
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFault(
            f"the export is checked against transformers, which cannot be imported ({error}); pip install "
            "transformers, or --skip-check (the model card then notes it)"
        ) from None
    return transformers


def our_logits(
    read: StateReader, model: ModelConfig, tokens: torch.Tensor, *, scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [batch, seq, vocab] of our model in plain torch, one layer in memory at a time."""
    ctx = ParallelContext.single()
    stream = DropoutStream(0, ctx.device)
    stream.enabled = False
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ctx, providers=torch_providers(), stream=stream,
        dtype=dtype,
    )

    spec, norms = model_spec(model), norm_weights(model)

    def filled(unit: nn.Module) -> nn.Module:
        for parameter in unit.parameters():
            record = record_of(parameter)
            read_local(read, record, "weight", parameter)
            if record.name not in norms:
                parameter.data.mul_(scale)
        for record, buffer in recorded_buffers(unit):
            if not record.name.endswith(LAST_STEP):
                read_local(read, record, BUFFER, buffer)
        return unit.eval()

    with torch.no_grad():
        x = filled(Embedding(spec.embedding, build))(tokens)
        for index, layer in enumerate(spec.layers):
            x = filled(TransformerLayer(index, layer, build))(x)
        out: torch.Tensor = filled(Head(spec.head, build))(x)
    return out.transpose(0, 1)[..., : model.vocab_size]
