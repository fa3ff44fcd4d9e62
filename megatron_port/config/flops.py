"""Counts in closed form: parameters and floating-point operations, from the shapes alone.

A multiply-add is two operations. Attention is counted in full (the causal half is
not taken off), the head is counted, element-wise work is not. With a heads of size
d, g key/value heads, MLP width f, sequence s, vocabulary V (unpadded), L layers:

* matrices of a layer   P = h·d·(2a + 2g) + 2·h·f  (3·h·f for swiglu)
* forward of a layer    2·s·P + 4·s²·a·d           (the second term: QKᵀ and the product with V)
* forward of the head   2·s·V·h

A backward costs twice its forward. For GPT (a·d = h, g = a, f = 4h) a step on B
samples is ``72·B·s·L·h²·(1 + s/6h + V/12Lh)``, and with full recompute, where every
layer but not the head runs forward twice, ``96·B·s·L·h²·(1 + s/6h + V/16Lh)``
(Narayanan et al., arXiv 2104.04473). *Model* FLOPs do not depend on recompute (MFU);
*hardware* FLOPs do (HFU). Selective recompute adds one forward of the attention core,
``72·B·s·L·h²·(1 + 2s/9h + V/12Lh)``; Korthikanti et al. (arXiv 2205.05198) print s/3h,
which counts the repeated core three times: their HFU is higher than ours.
"""

from __future__ import annotations

from megatron_port.config.schema import ModelConfig


def layer_matmul_parameters(model: ModelConfig) -> int:
    """Elements of the matrices of one transformer layer."""
    attention = model.hidden_size * model.head_size * (2 * model.num_attention_heads + 2 * model.kv_heads)
    matrices = 3 if model.activation == "swiglu" else 2
    return attention + matrices * model.hidden_size * model.ffn_size


def layer_parameters(model: ModelConfig) -> int:
    """Parameters of one transformer layer: matrices, biases and its two norms."""
    count = layer_matmul_parameters(model) + 2 * _norm_parameters(model)
    if model.add_bias:
        qkv = model.head_size * (model.num_attention_heads + 2 * model.kv_heads)
        first = model.ffn_size * (2 if model.activation == "swiglu" else 1)
        count += qkv + model.hidden_size + first + model.hidden_size
    return count


def embedding_parameters(model: ModelConfig) -> int:
    """Token table (unpadded) and, where positions are learned, the position table."""
    positions = model.seq_length if model.position_embedding == "learned" else 0
    return (model.vocab_size + positions) * model.hidden_size


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, padding left out; a tied head counts once. The head has no bias."""
    head = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return embedding_parameters(model) + model.num_layers * layer_parameters(model) + _norm_parameters(model) + head


def layer_forward_flops(model: ModelConfig) -> int:
    """Operations of one layer's forward on one sample."""
    return 2 * model.seq_length * layer_matmul_parameters(model) + attention_core_flops(model)


def attention_core_flops(model: ModelConfig) -> int:
    """Operations of QKᵀ and of the weights times V in one layer's forward on one sample: 4·s²·a·d."""
    return 4 * model.seq_length**2 * model.num_attention_heads * model.head_size


def head_forward_flops(model: ModelConfig) -> int:
    """Operations of the logits of one sample: 2·s·V·h."""
    return 2 * model.seq_length * model.vocab_size * model.hidden_size


def model_flops(model: ModelConfig) -> int:
    """Operations that training on one sample needs (forward and backward); the numerator of MFU."""
    return 3 * (model.num_layers * layer_forward_flops(model) + head_forward_flops(model))


def hardware_flops(model: ModelConfig, recompute: str = "none", tp: int = 1) -> int:
    """Operations that are executed for one sample; the numerator of HFU.

    ``recompute``: ``none``; ``selective`` adds one forward of the attention core of every
    layer; ``full`` adds one forward of every layer (not of the head). Each of ``tp`` tensor-parallel
    ranks projects at least one key/value head, so with fewer heads some are projected several times.

    Raises ValueError for an unknown ``recompute``.
    """
    copies = model.kv_heads_held(tp) - model.kv_heads
    copied = 2 * model.seq_length * model.hidden_size * model.head_size * 2 * copies
    again = {"none": 0, "selective": attention_core_flops(model), "full": layer_forward_flops(model) + copied}
    if recompute not in again:
        raise ValueError(f"unknown recompute {recompute!r}; one of {', '.join(again)}")
    return model_flops(model) + model.num_layers * (again[recompute] + 3 * copied)


def _norm_parameters(model: ModelConfig) -> int:
    with_bias = model.normalization == "layernorm" and model.add_bias
    return model.hidden_size * (2 if with_bias else 1)
