"""Parameters of each rank, in closed form. ``tests/unit/test_plan_memory.py`` compares them with the meta model's."""

from __future__ import annotations

from megatron_port.config.schema import ModelConfig
from megatron_port.plan.case import Case


def layer_elements(model: ModelConfig, tp: int) -> int:
    """Elements of one layer on a tensor-parallel rank: matrices and their biases split, norms and row biases whole, a
    key/value head that several ranks hold on each."""
    h, d, f = model.hidden_size, model.head_size, model.ffn_size
    heads, groups = model.num_attention_heads // tp, model.kv_heads_held(tp) // tp
    first = (f // tp) * (2 if model.activation == "swiglu" else 1)
    count = h * d * (2 * heads + 2 * groups) + h * first + h * (f // tp)
    if model.add_bias:
        count += d * (heads + 2 * groups) + h + first + h
    return count + 2 * norm_elements(model)


def norm_elements(model: ModelConfig) -> int:
    """Elements of one norm; never split."""
    return model.hidden_size * (2 if model.normalization == "layernorm" and model.add_bias else 1)


def stage_elements(case: Case, stage: int) -> int:
    """Elements that a rank of ``stage`` holds, padding and the last stage's copy of a tied embedding included."""
    model = case.model
    table = case.padded_vocab // case.tp * model.hidden_size
    count = case.stage_layers(stage) * layer_elements(model, case.tp)
    if stage == 0:
        count += table
        if model.position_embedding == "learned":
            count += model.seq_length * model.hidden_size
    if stage == case.grid.last_stage:
        count += norm_elements(model)
        if not (model.tie_embeddings and stage == 0):
            count += table
    return count
