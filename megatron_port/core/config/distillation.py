"""Section ``[distillation]``: a teacher whose predictions the model learns, and what stands against it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megatron_port.core.config.conflicts import Conflict, Rule, Table, always, native_only
from megatron_port.core.config.fine_tuning import NO_ADAPTERS
from megatron_port.core.config.quantisation import NO_QUANTISATION
from megatron_port.core.config.ranges import Fraction, PathSetting, Positive
from megatron_port.core.config.sparsity import NO_SPARSITY

if TYPE_CHECKING:
    from megatron_port.core.config.schema import ModelConfig, RunConfig


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


def as_teacher(model: ModelConfig) -> ModelConfig:
    """Return a model as it teaches: it predicts one token ahead, drops nothing, and is not trained under muP."""
    return replace(
        model, mtp_layers=0, hidden_dropout=0.0, attention_dropout=0.0, mup_base_size=0,
        logits_divisor=model.output_divisor,
    )


def teacher_run(config: RunConfig, teacher: ModelConfig) -> RunConfig:
    """Return the run of the teacher alone on the layout of ``config``: no adapters or recompute, a split of its own."""
    ep = config.layout.expert_parallel_size if teacher.moe.enabled else 1
    reset = config.data.position_reset and teacher.position_embedding == "learned"
    return replace(
        config, model=teacher, distillation=NO_TEACHER, fine_tuning=NO_ADAPTERS, quantisation=NO_QUANTISATION,
        sparsity=NO_SPARSITY, activations=type(config.activations)(),
        layout=replace(config.layout, pipeline_split=(), expert_parallel_size=ep),
        precision=replace(config.precision, fp8="none"), data=replace(config.data, position_reset=reset),
    )


CONFLICTS = (
    Table(asked="a [distillation] section without distillation.teacher or distillation.logits",
          on=lambda c: not c.distillation.enabled and c.distillation != NO_TEACHER,
          rows=(Rule(always, "{asked}, which learns from nobody; name a checkpoint or a Hugging Face folder, or leave "
                             "the section out"),)),
    Table(asked="[distillation]", on=lambda c: c.distillation.enabled, rows=(
        native_only("whose pipeline has one loss and no teacher"),
        Rule(lambda c: c.training.loss != "cross_entropy",
             "{asked} with training.loss {c.training.loss!r}, of which the teacher knows nothing; use cross_entropy"),
        Conflict("training.z_loss", "which is not in its loss", "leave one of the two out",
                 when=lambda c: c.training.z_loss > 0),
        Conflict("backend.graphs", "recorded steps have no place for distillation.logits", 'use graphs = "off"',
                 refused=("step",), when=lambda c: c.distillation.logits),
        Conflict("model.mtp_layers", "the teacher predicts one token ahead", "set 0",
                 when=lambda c: c.model.mtp_layers > 0),
    )),
)
