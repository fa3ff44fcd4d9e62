"""transformers' layers alone, forward and backward: GPT-2's block or Llama's, torch's scaled_dot_product_attention,
plain or under torch.compile.

transformers' own tensor parallelism cuts the layers' products and leaves the forward pass as it is, which takes the
heads from what a product gives. GPT-2's block is built in this way for a rank's shape: head size and hidden size are
the model's, the products are a rank's share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compare.peer import About, StackStep, Unable, autocast_dtype, need
from benchmarks.compare.sizes import Size
from benchmarks.compare.weights import Weights
from megatron_port.core.config.schema import ModelConfig

QUIET = {"attn_implementation": "sdpa"}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""In torch's one operation; transformers has slower ones of the same formula."""


def _gpt2_blocks(m: ModelConfig) -> list[nn.Module]:
    """On the device that is current, not filled."""
    transformers, found = need("transformers"), need("transformers.models.gpt2.modeling_gpt2")
    if m.hidden_size % m.head_size or m.kv_heads != m.num_attention_heads or not m.add_bias:
        raise Unable("GPT-2's block has a key for each query, biases, and heads that divide the hidden size")
    if m.activation not in ACTIVATIONS or m.position_embedding != "learned" or m.parallel_residual:
        raise Unable(f"GPT-2's block has no {m.activation}, {m.position_embedding}")
    config = transformers.GPT2Config(
        n_embd=m.hidden_size, n_head=m.hidden_size // m.head_size, n_inner=m.ffn_size, n_positions=m.seq_length,
        activation_function=ACTIVATIONS[m.activation], layer_norm_epsilon=m.norm_epsilon, resid_pdrop=0.0,
        attn_pdrop=0.0, embd_pdrop=0.0, **QUIET,
    )
    linear = need("transformers.pytorch_utils").Conv1D
    device, wide = torch.get_default_device(), m.head_size * m.num_attention_heads
    made = []
    for i in range(m.num_layers):
        with torch.device("meta"):  # products of the unsplit width are never allocated
            attention = found.GPT2Attention(config, layer_idx=i)
            block = found.GPT2Block(config, layer_idx=i)
        attention.c_attn, attention.c_proj = linear(3 * wide, m.hidden_size), linear(m.hidden_size, wide)
        attention.split_size = wide
        block.attn = attention
        made.append(block.to_empty(device=device))
    return made


def _fill_gpt2(block: Any, weights: Weights, name: str) -> None:
    """Its products are stored transposed."""
    attention, mlp = block.attn, block.mlp
    for kind in ("weight", "bias"):
        whole = {attention.c_attn: torch.cat(weights.qkv(f"{name}.attention.qkv.{kind}"))}
        for module, part in ((attention.c_proj, "attention.output"), (mlp.c_fc, "mlp.up"), (mlp.c_proj, "mlp.down")):
            whole[module] = weights.read(f"{name}.{part}.{kind}")
        for module, value in whole.items():
            getattr(module, kind).copy_(value.reshape(-1, value.shape[-1]).t() if kind == "weight" else value.flatten())
        block.ln_1.get_parameter(kind).copy_(weights.read(f"{name}.norm1.{kind}"))
        block.ln_2.get_parameter(kind).copy_(weights.read(f"{name}.norm2.{kind}"))


def _llama_config(m: ModelConfig) -> Any:
    if m.activation != "swiglu" or m.add_bias or m.position_embedding != "rope" or m.rotary_percent != 1.0:
        raise Unable("Llama's layer has SwiGLU, whole rotary embeddings and no biases")
    return need("transformers").LlamaConfig(
        hidden_size=m.hidden_size, num_attention_heads=m.num_attention_heads, num_key_value_heads=m.kv_heads,
        head_dim=m.head_size, intermediate_size=m.ffn_size, rms_norm_eps=m.norm_epsilon,
        max_position_embeddings=m.seq_length, rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta},
        attention_dropout=0.0, **QUIET,
    )


def _fill_llama(layer: Any, weights: Weights, name: str) -> None:
    q, k, v = weights.qkv(f"{name}.attention.qkv.weight")
    gate, up = weights.read(f"{name}.mlp.up.weight")
    attention, mlp = layer.self_attn, layer.mlp
    for module, value in (
        (attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v), (mlp.gate_proj, gate), (mlp.up_proj, up),
        (attention.o_proj, weights.read(f"{name}.attention.output.weight")),
        (mlp.down_proj, weights.read(f"{name}.mlp.down.weight")),
        (layer.input_layernorm, weights.read(f"{name}.norm1.weight")),
        (layer.post_attention_layernorm, weights.read(f"{name}.norm2.weight")),
    ):
        module.weight.copy_(value)


class Stack(nn.Module):
    """[b, s, h] → [b, s, h]."""

    def __init__(self, size: Size, weights: Weights) -> None:
        super().__init__()
        m, device, dtype = size.model, weights.device, autocast_dtype(size)
        llama = size.family == "llama"
        self.rope: Any = None
        with device, torch.no_grad():
            if llama:
                config, found = _llama_config(m), need("transformers.models.llama.modeling_llama")
                self.layers = nn.ModuleList(found.LlamaDecoderLayer(config, i) for i in range(m.num_layers))
                self.rope = found.LlamaRotaryEmbedding(config)
                self.register_buffer("positions", torch.arange(m.seq_length)[None], persistent=False)
            else:
                self.layers = nn.ModuleList(_gpt2_blocks(m))
            for i, layer in enumerate(self.layers):
                layer.to(dtype)
                (_fill_llama if llama else _fill_gpt2)(layer, weights, f"layers.{i}")

    def forward(self, x: Tensor) -> Tensor:
        more = {} if self.rope is None else {"position_embeddings": self.rope(x, self.positions)}
        for layer in self.layers:
            x = layer(x, **more)
        return x


class Layers(StackStep):
    """Forward and backward of a stack in its own dtype."""

    def __init__(self, size: Size, weights: Weights, compile: bool) -> None:
        self.about = About({
            "attention": "sdpa", "compile": "torch.compile" if compile else "off",
            "layers": "Llama" if size.family == "llama" else "GPT-2", "deepspeed": "not used", "optimizer": "not used",
        })
        if size.dtype != "fp32":
            self.about.settings["precision"] = "weights in bf16"
        self.stack = Stack(size, weights)
        self.run: Any = torch.compile(self.stack) if compile else self.stack
