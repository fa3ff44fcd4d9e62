"""The rule for two configurations of a model being of the same one: its weights then fit, and compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_port.core.config.dump import leaves
from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.model import ATTENTION, MixerKind, MoEConfig, RecurrentConfig, experts_of
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.registry import MIXERS
from megatron_port.ext.families.settings import mixers_of, mlps_of, norms_of, rotations_of, windows_of
from megatron_port.ext.weights.settings import TARGETS

FREE = frozenset({
    "name", "family", "hidden_dropout", "attention_dropout", "init_std", "mtp_weight", "moe.jitter",
    "moe.second_expert", "recurrent.chunk", "recurrent.segment",
    "moe.capacity_factor", "moe.drop_by", "moe.balance_loss", "moe.balance_weight", "moe.z_weight", "moe.bias_rate",
})
"""Fields of a model that its weights do not depend on."""


def with_sizes(model: ModelConfig) -> ModelConfig:
    """Return the model with its derived sizes filled in and its patterns in the shortest form; as it is where sizes
    cannot be derived (no heads)."""
    try:
        return replace(model, **sizes_of_all(model))
    except ArithmeticError:
        return model


def sizes_of_all(model: ModelConfig) -> dict[str, Any]:
    """Return the derived sizes of a model, its patterns in the shortest form, and what none of its layers reads at its
    default."""
    return {
        "num_query_groups": model.kv_heads, "head_dim": model.head_size, **experts_of(model), **windows_of(model),
        **rotations_of(model), **mixers_of(model), **mlps_of(model), **norms_of(model),
        "recurrent": recurrent_of(model), "latent_norm_epsilon": model.latent_norm_epsilon or model.norm_epsilon,
        **unread(model),
    }


def unread(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of attention and of feed-forward blocks at their defaults where no layer has such a part."""
    names, plain = set[str](), ModelConfig()
    if ATTENTION not in model.mixers and set(model.mixers) <= set(MIXERS.names):
        from megatron_port.ext.mixers.recurrent_spec import RecurrentKind
        from megatron_port.ext.mixers.settings import ATTENTION_SETTINGS

        kinds = [MIXERS.get(name, MixerKind) for name in model.mixers]
        if all(isinstance(kind, RecurrentKind) for kind in kinds):
            names |= {"num_attention_heads", "head_dim", *ATTENTION_SETTINGS}
            names -= {setting for kind in kinds for setting in kind.settings}
    if not any(model.has_mlp(layer) for layer in range(min(model.num_layers + model.mtp_layers, 1 << 16))):
        names |= {"ffn_hidden_size", "activation", "mlp_bias"}
        names |= {"add_bias"} if model.normalization == "rmsnorm" and "qkv_bias" in names else set()
    return {name: getattr(plain, name) for name in names}


def recurrent_of(model: ModelConfig) -> RecurrentConfig:
    """Return the sizes of a model's mixers with a state filled in; the defaults where it has none."""
    if model.mixers == (ATTENTION,):
        return RecurrentConfig()
    from megatron_port.ext.mixers.recurrent_spec import sizes_of

    return sizes_of(model)


def without_mup(model: ModelConfig) -> ModelConfig:
    """Return the model that computes the same without muP: its divisor of the logits is stated in full."""
    return replace(model, mup_base_size=0, logits_divisor=model.output_divisor)


def model_differences(theirs: ModelConfig, mine: ModelConfig, *, any_length: bool = False) -> list[str]:
    """Return the fields that differ, as ``x is 1 there and 2 here``; derived sizes are compared by their values.

    ``any_length``: under rope the length of a sample is no property of the weights, and ``mine`` may leave out what
    predicts further tokens.
    """
    there, here = dict(leaves(with_sizes(theirs))), dict(leaves(with_sizes(mine)))
    free = FREE | {"seq_length"} if any_length and mine.position_embedding == "rope" else FREE
    if theirs.output_divisor == mine.output_divisor:  # muP's part of it, or stated in full
        free |= {"mup_base_size", "logits_divisor"}
    if any_length and mine.mtp_layers == 0:
        free |= {"mtp_layers"}
    return [
        f"{name} is {there[name]!r} there and {value!r} here"
        for name, value in here.items() if name not in free and there[name] != value
    ]


def upcycling_differences(dense: ModelConfig, mine: ModelConfig) -> list[str]:
    """Return what keeps ``mine``, whose experts begin as copies of a dense model's MLP, from computing what that does:
    fields that differ, and those of its experts."""
    moe, sizes = mine.moe, f"the dense width {mine.ffn_size}"
    wrong = {
        "ffn_hidden_size": mine.expert_size != mine.ffn_size and f"{mine.expert_size}; it must be {sizes}",
        "shared_ffn_hidden_size": moe.shared_ffn_hidden_size and f"{moe.shared_ffn_hidden_size}; it must be 0",
        "normalize": not moe.normalize and "false; a token's shares must add up to 1: use true",
        "scale": moe.scale != 1.0 and f"{moe.scale}; it must be 1.0",
    }
    found = [f"moe.{name} is {text}" for name, text in wrong.items() if text]
    return model_differences(dense, replace(mine, moe=MoEConfig()), any_length=True) + found


def tuning_differences(theirs: FineTuningConfig, mine: FineTuningConfig) -> list[str]:
    """Return what makes the trained parameters of two runs different ones, or their product another."""
    if not (theirs.enabled and mine.enabled):
        return [] if theirs.method == mine.method else [_differs("method", theirs.method, mine.method)]
    there, here = (
        {name: getattr(f, name) for name in ("method", "rank", "alpha", "rslora")}
        | {"targets": [t for t in TARGETS if not f.targets or t in f.targets]} for f in (theirs, mine)
    )
    return [_differs(name, there[name], here[name]) for name in here if there[name] != here[name]]


def _differs(name: str, there: object, here: object) -> str:
    return f"fine_tuning.{name} is {there!r} there and {here!r} here"
