"""How close logits must be to transformers': the measure is its own rounding, which differs between processors.

In float32 ours may be twice as far from the exact logits as transformers' own are; in float64 nothing may be left. The
exact ones are transformers' model computed in float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hf_models as hf
import torch

from megatron_port.core.config.schema import LayoutConfig, ModelConfig
from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import BUFFER, WEIGHT
from megatron_port.core.engine.module import read_local, recorded_parameters
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext, BuildOptions
from megatron_port.core.model.decoder import GPTStage
from megatron_port.run.weights import Weights
from megatron_port.tools.interop.hf_files import HFFolder

FP64 = 1e-12


@dataclass(frozen=True)
class LogitErrors:
    """Distances from the exact logits, max|Δ| ÷ max|exact logit|."""

    ours: float
    """In float32."""
    theirs: float
    """transformers', in float32."""
    ours_fp64: float

    @property
    def allowed(self) -> float:
        """The most that ours in float32 may have."""
        return 2 * self.theirs

    def check(self, fp64: float = FP64) -> None:
        """Assert both bounds. ``fp64``: another one, where transformers itself is not exact in float64."""
        assert self.ours_fp64 <= fp64, f"float64 logits: {self.ours_fp64:.2e} from transformers', allowed {fp64:.0e}"
        assert self.ours <= self.allowed, f"float32 logits: {self.ours:.2e} from the exact ones, transformers' " \
                                          f"{self.theirs:.2e}, allowed twice that"


def stage_of(
    folder: HFFolder | Weights, model: ModelConfig | None = None, dtype: torch.dtype = torch.float32, *,
    position_reset: bool = False,
) -> GPTStage:
    """Return our model of a folder or of other weights (or another model, with those), in plain torch."""
    ctx = ParallelContext.single()
    model = model or folder.model
    stream = DropoutStream(0, ctx.device)
    stream.enabled = False
    context = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=8), ctx=ctx, providers=torch_providers(),
        step=StepSlot(stream), dtype=dtype, options=BuildOptions(position_reset=position_reset),
    )
    stage = GPTStage(context, start=0, stop=model.num_layers).eval()
    for record, parameter in recorded_parameters(stage):
        read_local(folder.read, record, WEIGHT, parameter)
    for record, buffer in recorded_buffers(stage):
        read_local(folder.read, record, BUFFER, buffer)
    return stage


def to_double(reference: Any) -> Any:
    """Convert transformers' model in place, but for rotary frequencies: in float32 they define the model. Compute with
    it inside ``hf.in_double``."""
    rotary = [m for name, m in reference.named_modules() if name.endswith("rotary_emb")]
    frequencies = [(m, name, buffer.float()) for m in rotary for name, buffer in m.named_buffers()]
    reference.double()
    for module, name, buffer in frequencies:
        setattr(module, name, buffer)
    return reference


@torch.no_grad()
def errors_of(
    reference: Any, ours: Callable[[torch.dtype], torch.Tensor], theirs: Callable[[], torch.Tensor]
) -> LogitErrors:
    """Measure the logits that ``ours`` returns in a dtype and ``theirs`` by ``reference``, which ends in float64."""
    mine, wide, plain = ours(torch.float32), ours(torch.float64), theirs()
    to_double(reference)
    with hf.in_double(reference):
        exact = theirs()
    assert exact.dtype == torch.float64 == wide.dtype
    return LogitErrors(hf.relative(mine, exact), hf.relative(plain, exact), hf.relative(wide, exact))


def logit_errors(folder: HFFolder | Weights, reference: Any, model: ModelConfig | None = None) -> LogitErrors:
    """Measure the logits of three samples of 32 tokens. ``model``: ours with other options than the folder's."""
    tokens = torch.randint(0, reference.config.vocab_size, (3, 32), generator=torch.Generator().manual_seed(1))

    def ours(dtype: torch.dtype) -> torch.Tensor:
        return stage_of(folder, model, dtype)(tokens).transpose(0, 1)[..., : reference.config.vocab_size]

    return errors_of(reference, ours, lambda: reference(tokens).logits)
