"""Section ``[distillation]``: a teacher whose predictions the model learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_port.core.config.ranges import Fraction, PathSetting, Positive


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Learning from a teacher: the loss of a token is alpha · CE + (1 - alpha) · T² · KL, with both distributions of KL
    at temperature T (Hinton et al., arXiv 1503.02531; engine native; docs/compression.md)."""

    teacher: PathSetting = ""
    """The teacher: a Hugging Face folder (safetensors), a run folder, or a checkpoint, of any layout. Its layers are
    split over the same ranks as the model's. Empty: there is none."""
    logits: PathSetting = ""
    """Folder that `distill logits` writes: the teacher's most likely tokens at every position of the training order.
    Where it is set, training reads it instead of running the teacher."""
    alpha: Fraction = 0.5
    """Share of the cross-entropy of the data; the rest is the teacher's."""
    temperature: Positive = 1.0
    """T, by which the logits of both are divided in KL."""
    divergence: Literal["forward", "reverse"] = "forward"
    """forward (KL of the teacher from the model: cover all that the teacher does) | reverse (KL of the model from the
    teacher: do only what the teacher does; Gu et al., arXiv 2306.08543)"""

    @property
    def enabled(self) -> bool:
        """Whether the loss has a teacher's part."""
        return bool(self.teacher or self.logits)

    @property
    def online(self) -> bool:
        """Whether the teacher runs beside the model."""
        return bool(self.teacher) and not self.logits


NO_TEACHER = DistillationConfig()
