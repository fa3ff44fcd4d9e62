"""A model of ours from the arguments that Megatron-DeepSpeed saves with a checkpoint (``args``)."""

from __future__ import annotations

from typing import Any, Literal

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError

_REFUSED = (
    ("apply_layernorm_1p", True, "layer norms whose weight is stored minus one"),
    ("squared_relu", True, "squared ReLU"),
    ("apply_residual_connection_post_layernorm", True, "residuals taken after the norm"),
    ("embed_layernorm", True, "a norm after the embedding"),
    ("parallel_attn_mlp", True, "attention and MLP in parallel"),
)


class Arguments:
    """``args`` of a checkpoint with defaults: an argument that a version does not have."""

    def __init__(self, state: dict[str, Any], where: str) -> None:
        self.state, self.where = state, where

    def get(self, name: str, default: Any) -> Any:
        """The argument, or the default where it is absent or None."""
        value = self.state.get(name)
        return default if value is None else value

    def need(self, name: str) -> int:
        """An integer that must be there. Raises CheckpointError."""
        value = self.state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(f"{self.where}: args.{name} is {value!r:.60}; give --model FILE.toml")
        return value


def model_from_args(state: dict[str, Any], where: str, *, vocab_size: int = 0) -> ModelConfig:
    """The model that ``args`` describes.

    ``vocab_size``: entries of the tokenizer. Megatron saves only the padded size; without it the padding is taken
    for entries.

    Raises:
        CheckpointError: an argument is missing, or asks for something that our model does not have.
    """
    a = Arguments(state, where)
    for name, value, what in _REFUSED:
        if bool(a.get(name, False)) is value:
            raise CheckpointError(f"{where}: trained with {what} (args.{name}), which this model does not have")
    experts = a.get("num_experts", [1])
    if experts not in ([1], 1, [], 0):
        raise CheckpointError(f"{where}: a mixture of experts (args.num_experts {experts}); only dense models are read")
    heads = a.need("num_attention_heads")
    hidden = a.need("hidden_size")
    head_size = int(a.get("kv_channels", hidden // max(heads, 1)))
    padded = a.need("padded_vocab_size")
    if not 0 <= vocab_size <= padded:
        raise CheckpointError(f"{where}: --vocab-size {vocab_size}, but the embedding has {padded} rows")
    rotary = bool(a.get("use_rotary_position_embeddings", False)) or _position(a) == "rotary"
    if _position(a) == "alibi":
        raise CheckpointError(f"{where}: trained with ALiBi positions, which this model does not have")
    if rotary and float(a.get("rotary_percent", 1.0)) != 1.0:
        raise CheckpointError(f"{where}: rotary positions on a part of each head (args.rotary_percent)")
    if not rotary and not a.get("add_position_embedding", True):
        raise CheckpointError(f"{where}: trained without positions, which this model does not have")
    groups = int(a.get("num_key_value_heads", heads))
    swiglu = bool(a.get("swiglu", False))
    return ModelConfig(
        name="imported", num_layers=a.need("num_layers"), hidden_size=hidden, num_attention_heads=heads,
        num_query_groups=0 if groups == heads else groups, head_dim=0 if head_size * heads == hidden else head_size,
        ffn_hidden_size=int(a.get("ffn_hidden_size", 4 * hidden)), vocab_size=vocab_size or padded,
        seq_length=a.need("max_position_embeddings") if not rotary else int(
            a.get("max_position_embeddings", a.get("seq_length", 1024))
        ),
        position_embedding="rope" if rotary else "learned", rope_theta=float(a.get("rope_theta", 10000.0)),
        normalization="rmsnorm" if a.get("normalization", "layernorm") == "rmsnorm" else "layernorm",
        norm_epsilon=float(a.get("layernorm_epsilon", 1e-5)), activation="swiglu" if swiglu else _gelu(a),
        add_bias=bool(a.get("add_bias_linear", True)),
        tie_embeddings=not a.get("untie_embeddings_and_output_weights", False),
        hidden_dropout=float(a.get("hidden_dropout", 0.0)), attention_dropout=float(a.get("attention_dropout", 0.0)),
        init_std=float(a.get("init_method_std", 0.02)),
    )


def _gelu(a: Arguments) -> Literal["gelu", "gelu_tanh"]:
    """The fused bias-GeLU of Megatron is the tanh form; without it, erf unless OpenAI's is asked for."""
    return "gelu_tanh" if a.get("bias_gelu_fusion", True) or a.get("openai_gelu", False) else "gelu"


def _position(a: Arguments) -> str:
    """``position_embedding_type``: in BigScience's fork an enum of 1 rotary, 2 absolute, 3 ALiBi; elsewhere a word."""
    value = a.get("position_embedding_type", None)
    if getattr(value, "args", None):
        value = value.args[0]
    known: dict[Any, str] = {1: "rotary", 3: "alibi", "rope": "rotary", "rotary": "rotary", "alibi": "alibi"}
    return known.get(value, "learned") if isinstance(value, (int, str)) else "learned"
