"""The model part of a run file: the network, whatever the layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from megatron_port.core.config.moe import MoEConfig
from megatron_port.core.config.ranges import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Share,
    Size,
    SizeOrZero,
    at_least,
)

CLAMP, SHARPNESS = 7.0, 1.702
"""swiglu_clamped: bound of gate and input, and the gate's factor in the sigmoid."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network. Nothing here depends on how it is split."""

    name: str = "gpt"
    """A label for logs and checkpoints."""
    family: str = "auto"
    """Hugging Face family that exports are written as: auto (the first that computes this model) | gpt2 | gpt_neox |
    llama | qwen2 | qwen3 | granite | starcoder2 | mistral | phi3 | olmo2 | smollm3 | gptj | falcon | gemma2 |
    gemma3_text | deepseek_v3 | mixtral | qwen2_moe | qwen3_moe | olmoe | deepseek_v2 | gpt_oss, or one that a plugin
    registers. Changes no number."""
    num_layers: Size = 2
    """Transformer layers."""
    shared_layers: Count = 1
    """Consecutive layers that use one set of weights, on one stage or several (ALBERT, arXiv 1909.11942: all of them);
    1: each has its own."""
    hidden_size: Size = 128
    """Width of the residual stream, h."""
    num_attention_heads: Size = 4
    """Query heads, a."""
    num_query_groups: SizeOrZero = 0
    """Key/value heads (grouped-query attention); 0: as many as query heads."""
    head_dim: SizeOrZero = 0
    """Size of one head; 0: hidden_size / num_attention_heads."""
    ffn_hidden_size: SizeOrZero = 0
    """Width of the MLP; 0: 4h for gelu, 8h/3 rounded up to a multiple of 256 with a gate."""
    vocab_size: Size = 50257
    """Entries of the tokenizer, before any padding."""
    seq_length: Size = 1024
    """Tokens per sample, s; also the number of learned positions."""
    mixer: str = "attention"
    """Mixer of the positions of a layer: attention, or one that a plugin registers."""
    position_embedding: Literal["learned", "rope"] = "learned"
    """Positions: a learned table, or rotary embeddings of queries and keys (rope)."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: Share = 1.0
    """Share of each head that rope rotates (GPT-NeoX: 0.25); the rest has no position."""
    window_rope_theta: NonNegative = 0.0
    """Base of the rotary frequencies of layers with a window, which are not scaled (Gemma 3); 0: the same as in other
    layers."""
    rope_pattern: tuple[Literal["rope", "none"], ...] = ()
    """Which layers rotate, each "rope" or "none" (SmolLM3: three and one), repeated over the layers; empty: all."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """none | linear (all frequencies divided by rope_factor) | llama3 (Llama 3.1: only the low ones) | yarn (Peng et
    al., arXiv 2309.00071: low ones too, and larger scores)"""
    rope_factor: Annotated[float, at_least(1)] = 1.0
    """linear, llama3, yarn: what low frequencies are divided by."""
    rope_original_length: CountOrZero = 0
    """llama3, yarn: tokens of the context before scaling."""
    rope_low_freq_factor: Positive = 1.0
    """llama3: frequencies with fewer turns than this in the original context are divided."""
    rope_high_freq_factor: Positive = 4.0
    """llama3: frequencies with more turns than this stay; between the two they blend."""
    rope_beta_fast: Positive = 32.0
    """yarn: frequencies with more turns than this in the original context stay."""
    rope_beta_slow: Positive = 1.0
    """yarn: those with fewer turns than this are divided; between the two they blend."""
    rope_attention_factor: NonNegative = 0.0
    """yarn: factor on queries and on keys; 0: the paper's 1 + 0.1 ln(rope_factor)."""
    rope_truncate: bool = True
    """yarn: the blend begins and ends at a whole pair (not with GPT-OSS)."""
    normalization: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalization before attention, before the MLP and before the head."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """Where the norms of attention and MLP are: before them (pre), after them (post: OLMo 2), or both (Gemma 2)."""
    norm_zero_centered: bool = False
    """Norms multiply by 1 + weight, and weights start at 0 (Gemma)."""
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input (GPT-J, GPT-NeoX), instead of one after the other."""
    kv_lora_rank: SizeOrZero = 0
    """Size of the latent from which every head's keys and values are made (multi-head latent attention, DeepSeek-V2,
    arXiv 2405.04434); 0: none. head_dim is then the size of queries and keys, and there are no query groups."""
    q_lora_rank: SizeOrZero = 0
    """Latent attention: size of the latent from which queries are made; 0: they come from the input."""
    qk_rope_head_dim: SizeOrZero = 0
    """Latent attention: elements of a head that rope rotates; all heads share those of the keys."""
    v_head_dim: SizeOrZero = 0
    """Latent attention: elements of a value; 0: as many as head_dim."""
    shared_norm: bool = False
    """Under parallel_residual, attention and MLP read the same norm (GPT-J, Falcon-7B)."""
    qk_norm: bool = False
    """RMSNorm of queries and of keys, before rotation."""
    qk_norm_over: Literal["head", "projection"] = "head"
    """qk_norm: each head by itself, with one weight of a head's size (Qwen3); or all heads of a token at once, with a
    weight for each element (OLMo 2)."""
    norm_epsilon: Positive = 1e-5
    """Added to the variance."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu_tanh", "swiglu_clamped"] = "gelu"
    """gelu (erf) | gelu_tanh | swiglu (SiLU gate) | geglu_tanh (gelu_tanh gate: Gemma) | swiglu_clamped (g · sigmoid(
    1.702 g) · (u + 1) with g at most 7 and u within ±7: GPT-OSS); the last two are torch's ops with any provider"""
    add_bias: bool = True
    """Biases in all linears of the layers and (with layernorm) norms."""
    qkv_bias: bool = False
    """Biases in the projections of queries, keys and values (Qwen2); without add_bias."""
    mlp_bias: bool = False
    """Biases in the MLP (GPT-J); without add_bias."""
    norm_bias: bool = False
    """Biases in LayerNorms (Falcon, GPT-J); without add_bias."""
    head_bias: bool = False
    """A bias of each logit (GPT-J)."""
    tie_embeddings: bool = True
    """The head uses the token embedding's matrix."""
    hidden_dropout: Fraction = 0.0
    """Probability, after the embedding and each residual branch."""
    attention_dropout: Fraction = 0.0
    """Probability, on attention weights; the same in every layout; needs the provider own or math."""
    init_std: NonNegative = 0.02
    """Standard deviation of the initial weights; output layers use init_std / sqrt(2 L)."""
    embedding_multiplier: Positive = 1.0
    """Factor on the embedded tokens (Granite)."""
    scale_embedding: bool = False
    """Multiply embedded tokens by the square root of hidden_size, rounded to the weights' dtype (Gemma)."""
    residual_multiplier: Positive = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    attention_scale: NonNegative = 0.0
    """Factor on the products of queries and keys; 0: 1 / sqrt(head size). Needs rope, whose tables carry it."""
    logits_divisor: Positive = 1.0
    """Divisor of the logits."""
    mup_base_size: CountOrZero = 0
    """hidden_size of the narrow model whose learning rate, weight decay and init_std are used here (muP, Tensor
    Programs V, arXiv 2203.03466; docs/optimizers.md): with m = hidden_size / this, matrices start at
    init_std / √m and learn at lr / m, and logits are divided by m. 0: no muP."""
    logits_softcap: NonNegative = 0.0
    """Bound c of the logits, c · tanh(logit / c) (Gemma 2); 0: none."""
    sliding_window: CountOrZero = 0
    """Most keys that a query of a windowed layer sees, itself included; 0: no layer has a window."""
    attention_pattern: tuple[Literal["full", "window"], ...] = ()
    """Attention of the layers, repeated over them: full | window (over sliding_window); empty: full in all layers."""
    attention_sinks: bool = False
    """A learned score per query head that takes part in the softmax without a value (GPT-OSS)."""
    attention_softcap: NonNegative = 0.0
    """cap · tanh(score / cap) in place of each attention score (Gemma 2); 0: none."""
    mtp_layers: CountOrZero = 0
    """Modules that each predict one token further ahead, only in training (multi-token prediction, DeepSeek-V3, arXiv
    2412.19437); 0: none."""
    mtp_weight: NonNegative = 0.3
    """Multi-token prediction: weight of the mean of the modules' losses, added to the model's own."""
    qkv_rank: SizeOrZero = 0
    """The fused projection of queries, keys and values is a product of two trained factors, [rows, r] and [r, h]
    (`megatron-port compress run --factor`); 0: one matrix."""
    output_rank: SizeOrZero = 0
    """Rank of the factors of attention's output projection; 0: whole."""
    up_rank: SizeOrZero = 0
    """Rank of the factors of the first matrix (with its gate) of dense layers' MLP; 0: whole."""
    down_rank: SizeOrZero = 0
    """Rank of the factors of the last matrix of dense layers' MLP; 0: whole."""
    moe: MoEConfig = field(default_factory=MoEConfig)

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each factored linear, by ``qkv``, ``output``, ``up``, ``down``."""
        found = {name: getattr(self, f"{name}_rank") for name in ("qkv", "output", "up", "down")}
        return {name: rank for name, rank in found.items() if rank}

    def owner_of(self, layer: int) -> int:
        """Return the first of the layers that share the weights of a layer."""
        return layer - layer % self.shared_layers

    def window_of(self, layer: int) -> int:
        """Return the window of a layer's attention; 0: its queries see all keys before them."""
        kinds = self.attention_pattern or ("window",)
        return self.sliding_window if kinds[layer % len(kinds)] == "window" else 0

    @property
    def width_factor(self) -> float:
        """muP's m: how many times as wide the model is as the one that its settings were found for; 1 without muP."""
        return self.hidden_size / self.mup_base_size if self.mup_base_size else 1.0

    @property
    def matrix_std(self) -> float:
        """Standard deviation of the initial matrices of the layers; of those that write to the residual stream before
        it is divided by sqrt(2 L)."""
        return self.init_std / math.sqrt(self.width_factor)

    @property
    def output_divisor(self) -> float:
        """Divisor of the logits, muP's included."""
        return self.logits_divisor * self.width_factor

    @property
    def expert_size(self) -> int:
        """Width of an expert after the default is applied."""
        return self.moe.ffn_hidden_size or self.ffn_size

    @property
    def kv_heads(self) -> int:
        """Key/value heads after the default is applied."""
        return self.num_query_groups or self.num_attention_heads

    def kv_heads_held(self, tp: int) -> int:
        """Key/value heads that ``tp`` tensor-parallel ranks hold together: each rank at least one, copies included."""
        return max(self.kv_heads, tp)

    @property
    def head_size(self) -> int:
        """Elements in one head after the default is applied."""
        return self.head_dim or self.hidden_size // max(self.num_attention_heads, 1)

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rope rotates."""
        return self.qk_rope_head_dim if self.kv_lora_rank else int(self.head_size * self.rotary_percent)

    @property
    def value_size(self) -> int:
        """Elements of a head's value after the default is applied."""
        return self.v_head_dim or self.head_size

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies its activation by a second projection."""
        return self.activation in ("swiglu", "geglu_tanh", "swiglu_clamped")

    def rotates(self, layer: int) -> bool:
        """Return whether layer ``layer`` (from 0) rotates queries and keys."""
        pattern = self.rope_pattern or ("rope",)
        return self.position_embedding == "rope" and pattern[layer % len(pattern)] == "rope"

    @property
    def ffn_size(self) -> int:
        """MLP width after the default is applied."""
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        if self.gated:
            return -(-(8 * self.hidden_size) // 3 // 256) * 256
        return 4 * self.hidden_size
