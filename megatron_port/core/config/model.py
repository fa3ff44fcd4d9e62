"""The model part of a run file: the network, whatever the layout."""

from __future__ import annotations

import fractions
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from megatron_port.core.config.ranges import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    PathSetting,
    Positive,
    Ratio,
    Share,
    Size,
    SizeOrZero,
    at_least,
)
from megatron_port.core.registry import MIXERS

# Tables ``[model.moe]`` and ``[moe]``: layers of many experts, and what a run does with their routes.

@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Layers whose feed-forward block is many experts, each token being sent to a few (docs/moe.md). A group, over
    which capacity and balance are counted, is one sample: so neither depends on the layout."""

    num_experts: SizeOrZero = 0
    """Experts of a layer, E; 0: all layers are dense."""
    top_k: Size = 2
    """Experts that each token is sent to, k."""
    ffn_hidden_size: SizeOrZero = 0
    """Width of an expert; 0: that of the dense layers."""
    shared_ffn_hidden_size: SizeOrZero = 0
    """Width of a block that every token passes beside its experts (DeepSeek: shared experts x their width); 0: none."""
    shared_gate: bool = False
    """Multiply the shared block by the sigmoid of a product of the token with a learned row (Qwen2-MoE)."""
    first_dense: CountOrZero = 0
    """Layers at the beginning that have no experts (DeepSeek-V3: 3)."""
    every: Count = 1
    """Every n-th of the layers after those has experts (Switch, GShard: 2)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Score of an expert from its logit: over all (softmax), or of each (sigmoid, DeepSeek-V3); fp32 or wider."""
    normalize: bool = True
    """Divide the scores of a token's experts by their sum (Mixtral, Qwen3, DeepSeek-V3; not Switch, OLMoE)."""
    scale: Positive = 1.0
    """Factor on the experts' output (DeepSeek-V3: 2.5)."""
    groups: Size = 1
    """Runs of experts, on one node each; a token may go to top_groups of them (DeepSeek-V3: 8)."""
    top_groups: Size = 1
    """Groups that a token's experts are chosen from (DeepSeek-V3: 4)."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best expert's (DeepSeek-V2), or the sum of its two best (DeepSeek-V3)."""
    router_bias: bool = False
    """A learned bias of each expert's logit (GPT-OSS)."""
    jitter: Fraction = 0.0
    """While training, the router reads its input times a number drawn from 1 - jitter to 1 + jitter (Switch: 0.01)."""
    second_expert: Literal["top", "random"] = "top"
    """random: the second of two experts is used with a probability of twice its weight (GShard)."""
    capacity_factor: NonNegative = 0.0
    """An expert takes at most this x k x seq_length / E tokens of a sample, and the others skip it; 0: no limit.
    Generation does not apply it, because it does not know the sample."""
    drop_by: Literal["position", "probability"] = "position"
    """Tokens that an expert at its capacity keeps: the first ones (Switch), or those with the highest scores."""
    balance_loss: Literal["none", "sequence", "previous_step"] = "none"
    """none | sequence (of each sample by itself; Switch's loss, DeepSeek-V3's sequence-wise one) | previous_step (the
    shares of experts are those of the last step's global batch)"""
    balance_weight: NonNegative = 0.01
    """Factor of the balance loss."""
    z_weight: NonNegative = 0.0
    """Factor of the mean square of the logits' log-sum-exp (ST-MoE: 0.001)."""
    balance_bias: bool = False
    """A bias that only chooses experts, raised for those below the mean load of a step and lowered for those above
    (DeepSeek-V3, arXiv 2408.15664)."""
    bias_rate: NonNegative = 0.001
    """Change of that bias in a step."""

    @property
    def enabled(self) -> bool:
        """Whether any layer has experts."""
        return self.num_experts > 0

    @property
    def drops(self) -> bool:
        """Whether a token may lose an expert that it chose."""
        return self.capacity_factor > 0 or self.second_expert == "random"

    def has_experts(self, layer: int) -> bool:
        """Return whether layer ``layer`` (from 0) has experts."""
        return self.enabled and layer >= self.first_dense and (layer - self.first_dense + 1) % self.every == 0

    def capacity(self, seq_length: int) -> int:
        """Return the tokens of a sample that an expert takes; 0: all of them."""
        if not self.capacity_factor:
            return 0
        written = fractions.Fraction(repr(self.capacity_factor))  # 1.15 itself: the binary number is below it
        return max(1, int(written * self.top_k * seq_length / self.num_experts))


def experts_of(model: ModelConfig) -> dict[str, Any]:
    """Return ``moe`` and ``ffn_hidden_size`` with sizes filled in, and fields without effect at their defaults."""
    moe, plain = model.moe, MoEConfig()
    if not moe.enabled:
        return {"moe": plain, "ffn_hidden_size": model.ffn_size}
    unused = ("top_groups", "group_score") if moe.groups == 1 else ()
    moe = replace(moe, ffn_hidden_size=model.expert_size, **{name: getattr(plain, name) for name in unused})
    dense = not all(moe.has_experts(layer) for layer in range(model.num_layers))
    return {"moe": moe, "ffn_hidden_size": model.ffn_size if dense else model.expert_size}


@dataclass(frozen=True, kw_only=True)
class RoutesConfig:
    """Log and replay of the routes of a run's tokens; changes no number, except that replay fixes them."""

    routes: Literal["none", "log"] = "none"
    """none | log (write the experts of each token of each layer and step to the run's folder)"""
    replay: PathSetting = ""
    """Folder of logged routes that the router follows instead of its own choice; empty: none."""
    starved_share: Fraction = 0.1
    """An expert starves if it gets less than this share of the mean load of its layer's experts."""
    starved_steps: CountOrZero = 100
    """Steps in a row after which a starving expert is named in a warning; 0: never."""
    imbalance: Ratio = 1.8
    """Only for plans: rows of the busiest expert-parallel rank in a layer, over the mean. 1: balance is forced. Four
    published pairs, with and without forced balance, give the default (benchmarks/evidence/planner-accuracy.md)."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Mixers with a state (docs/mixers.md)."""

    heads: SizeOrZero = 0
    """Heads of values; 0: num_attention_heads."""
    key_heads: SizeOrZero = 0
    """Heads of queries and keys, each of which as many heads of values share; 0: as many as heads."""
    key_size: SizeOrZero = 0
    """Elements of a query and of a key; 0: the size of an attention head."""
    value_size: SizeOrZero = 0
    """Elements of a value; 0: the size of an attention head."""
    kernel: Size = 4
    """Positions that the short convolution reads."""
    chunk: Size = 64
    """Positions whose pairs are computed at once: more take more memory. Changes results by rounding alone."""
    segment: Size = 2048
    """Positions that the backward pass computes again at once: more take more memory. Changes only rounding."""
    convolution_bias: bool = False
    """Biases of the convolution; in short_conv of its projections too."""
    step_min: NonNegative = 0.0
    """mamba2: least time step."""
    step_max: NonNegative = 0.0
    """mamba2: largest time step; 0: any."""
    gated_norm: Literal["group", "all", "none"] = "group"
    """mamba2: norm of the result over the heads that share keys, over all heads, or none (Falcon-H1)."""
    norm_before_gate: bool = False
    """mamba2: the gate is behind the norm, not before it."""
    multipliers: tuple[float, ...] = ()
    """mamba2: factors of the projected gates, values, keys, queries and time steps (Falcon-H1); empty: 1 each."""
    result_multiplier: Positive = 1.0
    """mamba2: factor of the result (Falcon-H1)."""
    attention_multiplier: Positive = 1.0
    """attention_mamba2: factor of what attention adds to the mixer's result (Falcon-H1)."""
    norm_epsilon: NonNegative = 0.0
    """Added to the variance by the norm of the result; 0: model.norm_epsilon."""
    negative_eigenvalues: bool = False
    """gated_delta: rates from 0 to 2, not to 1, so that a state may change its sign (Olmo-Hybrid; arXiv 2411.12537)."""


CLAMP, SHARPNESS = 7.0, 1.702
"""swiglu_clamped: bound of gate and input, and the gate's factor in the sigmoid."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network. Nothing here depends on how it is split."""

    name: str = "gpt"
    """A label for logs and checkpoints."""
    family: str = "auto"
    """Hugging Face family that exports are written as: auto (the first that computes this model), or one of these,
    or a plugin's: docs/huggingface.md has the settings that each computes. Changes no number."""
    num_layers: Size = 2
    """Transformer layers."""
    shared_layers: Count = 1
    """Consecutive layers that use one set of weights, on one stage or several (ALBERT: all of them); 1: none do."""
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
    """Mixer of the positions of a layer: attention | gated_delta (Gated DeltaNet, arXiv 2412.06464) | short_conv (gated
    short convolution: LFM2) | mamba2 (arXiv 2405.21060) | kda (Kimi Delta Attention, arXiv 2510.26692) |
    attention_mamba2 (attention and mamba2 of one input, added: Falcon-H1), or one that a plugin registers."""
    mixer_pattern: tuple[str, ...] = ()
    """Mixers of the layers, repeated over them (Qwen3-Next: three of gated_delta, one of attention); empty: mixer."""
    mlp_pattern: tuple[Literal["mlp", "none"], ...] = ()
    """Which layers have a feed-forward block, repeated over them (Nemotron-H, Mamba-2); empty: all."""
    position_embedding: Literal["learned", "rope"] = "learned"
    """Positions: a learned table, or rotary embeddings of queries and keys (rope)."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: Share = 1.0
    """Share of each head that rope rotates (GPT-NeoX: 0.25); the rest has no position."""
    window_rope_theta: NonNegative = 0.0
    """Base of the rotary frequencies of layers with a window, which are not scaled (Gemma 3); 0: as in others."""
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
    norm_pattern: tuple[Literal["pre", "post", "sandwich"], ...] = ()
    """norm_placement of each layer, repeated over them (Olmo-Hybrid: post in attention's); empty: the same in all."""
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
    latent_norm_epsilon: NonNegative = 0.0
    """Latent attention: added to the variance by the norms of latents; 0: norm_epsilon."""
    shared_norm: bool = False
    """Under parallel_residual, attention and MLP read the same norm (GPT-J, Falcon-7B)."""
    qk_norm: bool = False
    """RMSNorm of queries and of keys, before rotation."""
    qk_norm_over: Literal["head", "projection"] = "head"
    """qk_norm: each head by itself, with one weight of a head's size (Qwen3); or all heads of a token at once, with a
    weight for each element (OLMo 2)."""
    norm_epsilon: Positive = 1e-5
    """Added to the variance."""
    activation: Literal["gelu", "gelu_tanh", "relu2", "swiglu", "geglu_tanh", "swiglu_clamped"] = "gelu"
    """gelu (erf) | gelu_tanh | relu2 (max(x, 0)²: Nemotron-H) | swiglu (SiLU gate) | geglu_tanh (gelu_tanh gate: Gemma)
    | swiglu_clamped (g · sigmoid(1.702 g) · (u + 1) with g at most 7 and u within ±7: GPT-OSS); torch's ops with any
    provider: relu2 and the last two"""
    mlp_multipliers: tuple[float, ...] = ()
    """swiglu: factors of the gate, before its activation, and of the result (Falcon-H1); empty: 1 each."""
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
    attention_chunk: CountOrZero = 0
    """Positions of a chunk, outside which queries of chunked layers see no key (Llama 4: 8192); 0: no layer has any."""
    attention_pattern: tuple[Literal["full", "window", "chunk"], ...] = ()
    """Attention of the layers, repeated over them: full | window (over sliding_window) | chunk; empty: full in all."""
    attention_sinks: bool = False
    """A learned score per query head that takes part in the softmax without a value (GPT-OSS)."""
    attention_gate: bool = False
    """The result of attention is multiplied by the sigmoid of a gate for each of its elements (Qwen3-Next)."""
    attention_softcap: NonNegative = 0.0
    """cap · tanh(score / cap) in place of each attention score (Gemma 2); 0: none."""
    mtp_layers: CountOrZero = 0
    """Modules that each predict one token further ahead, only in training (DeepSeek-V3, arXiv 2412.19437); 0: none."""
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
    recurrent: RecurrentConfig = field(default_factory=RecurrentConfig)
    """Sizes of mixers with a state."""

    @property
    def mixers(self) -> tuple[str, ...]:
        """Mixers of the layers, each once."""
        return tuple(dict.fromkeys((self.mixer_pattern or (self.mixer,))[: self.num_layers + self.mtp_layers]))

    def mixer_of(self, layer: int) -> str:
        """Return the mixer of layer ``layer`` (from 0)."""
        names = self.mixer_pattern or (self.mixer,)
        return names[layer % len(names)]

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

    def chunk_of(self, layer: int) -> int:
        """Return the chunk of a layer's attention; 0: there is none."""
        kinds = self.attention_pattern or ("full",)
        return self.attention_chunk if kinds[layer % len(kinds)] == "chunk" else 0

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

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer (from 0) has a feed-forward block."""
        return not self.mlp_pattern or self.mlp_pattern[layer % len(self.mlp_pattern)] == "mlp"

    def norms_of(self, layer: int) -> str:
        """Return where the norms of a layer (from 0) are."""
        return self.norm_pattern[layer % len(self.norm_pattern)] if self.norm_pattern else self.norm_placement

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


# Mixers of positions beside attention.

ATTENTION = "attention"


@dataclass(frozen=True)
class MixerKind:
    """A mixer that ``model.mixer`` and ``model.mixer_pattern`` may name.

    Args:
        spec: (model, number of the layer) → its ``model.spec.MixerSpec``. Layers that it leaves to attention have
            ``model.decoder_spec.attention_spec``. It is called often and must not depend on anything else.
        context: context-parallel ranks may divide the positions.
        documents: it stays within documents (``data.attention_documents = "within"``).
        memory: generation need not read a sequence again for each token (``inference.model.RemembersTokens``).
        settings: those of attention that it reads (``ext.mixers.settings.ATTENTION_SETTINGS``).
    """

    spec: Callable[[ModelConfig, int], Any]
    context: bool = False
    documents: bool = False
    memory: bool = False
    settings: frozenset[str] = frozenset()


def mixer_kind(model: ModelConfig, layer: int) -> MixerKind | None:
    """Return the mixer of layer ``layer`` (from 0); None: it has attention.

    Raises:
        ConfigError: nobody has registered a mixer of that name.
    """
    name = model.mixer_of(layer)
    return None if name == ATTENTION else MIXERS.get(name, MixerKind)
