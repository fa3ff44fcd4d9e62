"""Settings of objectives beside the next token: several tokens ahead, pairs of answers, a teacher, those of plugins.

The settings that contradict each (``registry.CONFLICTS``), and the configuration of a teacher's run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.conflicts import Conflict, Rule, Table, always, native_only
from megatron_port.core.config.features import NO_ADAPTERS, NO_QUANTISATION, NO_SPARSITY, NO_TEACHER
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.registry import OBJECTIVES
from megatron_port.ext.objectives.policy_settings import POLICY, WEIGHTED


def _too_short(config: RunConfig) -> list[str]:
    depths, length = config.model.mtp_layers, config.model.seq_length
    return [f"model.mtp_layers {depths} does not go with seq_length {length}: module {depths} would have no token to "
            f"predict; use at least {depths + 1}"] if length <= depths else []


PAIRS = ("dpo", "orpo")
"""Losses of pairs of answers."""

MULTI_TOKEN = (Table(
    asked="model.mtp_layers {c.model.mtp_layers}", on=lambda c: c.model.mtp_layers, link="does not go with", sized=True,
    rows=(
        # A table of learned positions would need another copy on the last stage.
        Conflict("model.position_embedding", use='use "rope"', allowed=("rope",)),
        native_only("whose loss is that of one set of logits", 'use "native"'),
        Conflict("backend.graphs", "each depth's number of tokens differs from step to step", 'use "off"',
                 refused=("step",)),
        Conflict("precision.fp8", "in which it is not proved", 'use "none"', allowed=("none",)),
        Conflict("fine_tuning.method", "whose adapters are of the model's own layers", "use mtp_layers = 0",
                 allowed=("none",)),
    ), more=(_too_short,),
),)


def _of_a_plugin(config: RunConfig) -> list[str]:
    """Return what contradicts a plugin's objective, which states it on its class; the package's own have tables, so
    that a check need not import torch."""
    name = config.training.loss
    if name not in OBJECTIVES.added:
        return []
    found: Any = OBJECTIVES.get(name, type)
    rows = (
        native_only("whose loss is a mean over tokens"),
        Conflict("model.mtp_layers", "only the model's own predictions have a loss", "set 0"),
        *found.conflicts,
    )
    return Table(rows, f'training.loss "{name}"').problems(config)


LOSSES = (
    Table(more=(_of_a_plugin,)),
    Table(rows=(
        Rule(lambda c: c.training.z_loss and c.training.loss != "cross_entropy",
             "training.z_loss {c.training.z_loss} is a part of the loss cross_entropy, and training.loss is "
             "{c.training.loss!r}, which brings its own terms; use 0"),
    )),
    Table(asked='training.loss "{c.training.loss}"', on=lambda c: c.training.loss in PAIRS, rows=(
        native_only("whose loss is a mean over tokens"),
        Conflict("data.attention_documents", "the rejected answer would see the chosen one",
                 "use attention_documents = 'within'", refused=("across",)),
        Rule(lambda c: c.model.position_embedding == "learned" and not c.data.position_reset,
             "{asked} with learned positions, which would differ between the two answers; set data.position_reset = "
             "true"),
        Conflict("data.packing", "a sample is one pair", "leave packing out", allowed=("none",)),
        Conflict("data.order", "which cuts documents where a sample ends", "use order 'stateless'",
                 allowed=("stateless",)),
        Conflict("data.synthetic", "which has no pairs",
                 "name corpora made by `data prepare --preference` in data.train"),
        Conflict("data.source", "which brings its own samples", "leave it out",
                 when=lambda c: c.data.source != "corpus"),
        Conflict("data.mask_eod_loss", "the corpus says which tokens count", "leave it out"),
        Conflict("layout.context_parallel_size", "which divides a pair", "use 1",
                 when=lambda c: c.layout.context_parallel_size > 1),
        Conflict("model.mtp_layers", "only the model's own predictions are answers", "set 0",
                 when=lambda c: c.model.mtp_layers > 0),
    )),
    *POLICY, *WEIGHTED,
)


def as_teacher(model: ModelConfig) -> ModelConfig:
    """Return a model as it teaches: it predicts one token ahead, drops nothing, and is not trained under muP."""
    return replace(
        model, mtp_layers=0, hidden_dropout=0.0, attention_dropout=0.0, mup_base_size=0,
        logits_divisor=model.output_divisor,
    )


def teacher_run(config: RunConfig, teacher: ModelConfig) -> RunConfig:
    """Return the run of the teacher alone on the layout of ``config``, with its own split of layers and without
    adapters or recompute."""
    ep = config.layout.expert_parallel_size if teacher.moe.enabled else 1
    reset = config.data.position_reset and teacher.position_embedding == "learned"
    return replace(
        config, model=teacher, distillation=NO_TEACHER, fine_tuning=NO_ADAPTERS, quantisation=NO_QUANTISATION,
        sparsity=NO_SPARSITY, activations=type(config.activations)(),
        layout=replace(config.layout, pipeline_split=(), expert_parallel_size=ep),
        precision=replace(config.precision, fp8="none"), data=replace(config.data, position_reset=reset),
    )


TEACHER = (
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
        Conflict("backend.graphs", "captured steps have no place for distillation.logits", 'use graphs = "off"',
                 refused=("step",), when=lambda c: c.distillation.logits),
        Conflict("model.mtp_layers", "the teacher predicts one token ahead", "set 0",
                 when=lambda c: c.model.mtp_layers > 0),
    )),
)
