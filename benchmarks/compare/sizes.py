"""What is trained: shapes, batch, precision, and how many operations a step has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import ModelConfig, OptimizerConfig, RunConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.telemetry.flops import model_flops, parameter_count

OPTIMIZER = OptimizerConfig(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_grad=1.0, decay="constant")
"""Of every peer. Decay on matrices and embeddings only; gradients clipped to a global norm of 1."""


@dataclass(frozen=True)
class Size:
    """One row of the comparison."""

    name: str
    model: ModelConfig
    micro_batch: int
    """Samples of a forward pass."""
    global_batch: int
    """Samples of an optimizer step."""
    dtype: str
    """fp32, or bf16: products in bf16, masters, moments and sums of gradients in fp32."""
    layers_only: bool = False
    """A stack of layers, forward and backward, without embedding, head, clip and optimizer; weights are ``dtype``."""
    about: str = ""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.model.seq_length

    @property
    def flops(self) -> int:
        """Model FLOPs of a step (``telemetry.flops``): attention in full, recompute left out."""
        if self.layers_only:
            layers = model_spec(self.model).layers
            return 3 * sum(layer.forward_flops(self.model.seq_length) for layer in layers) * self.global_batch
        return model_flops(self.model) * self.global_batch

    @property
    def for_tests(self) -> bool:
        """Whether its times say nothing, so that what is measured beside them may be small too."""
        return self.name.startswith("tiny")

    @property
    def family(self) -> str:
        """gpt | llama: what a peer must be able to build."""
        return "llama" if self.model.normalization == "rmsnorm" else "gpt"

    @property
    def state_bytes(self) -> int:
        """Weights, gradient sums, masters and moments, the most that a peer keeps."""
        if self.layers_only:
            return 6 * parameter_count(self.model)
        return parameter_count(self.model) * (16 if self.dtype == "fp32" else 18)

    @property
    def step_bytes(self) -> float:
        """About what a step needs in all: state, activations without recompute (34 bytes an element of a layer's input
        in bf16, Korthikanti et al., attention's scores not kept), logits and their gradient."""
        m, rows = self.model, self.micro_batch * self.model.seq_length
        wide = 1 if self.dtype == "bf16" else 2
        kept = 34.0 * wide * rows * m.hidden_size * m.num_layers
        return self.state_bytes + kept + (0.0 if self.layers_only else 8.0 * rows * m.vocab_size)

    def layers_in(self, memory: int) -> int:
        """As many of its layers as fit into so many bytes, 5 % of which are left to the libraries; at least 1."""
        counts = range(self.model.num_layers, 1, -1)
        return next((n for n in counts if replace(self, model=replace(self.model, num_layers=n)).step_bytes
                     <= 0.95 * memory), 1)

    def run_config(self, fp8: str = "none") -> RunConfig:
        """As this project is given it."""
        from megatron_port.core.config.schema import BatchConfig, LayoutConfig, PrecisionConfig

        return RunConfig(
            name=self.name, engine="native", model=self.model, optimizer=OPTIMIZER,
            layout=LayoutConfig(data_parallel_size=1, zero_stage=0, vocab_padding_multiple=1),
            batch=BatchConfig(micro_batch_size=self.micro_batch, global_batch_size=self.global_batch),
            precision=PrecisionConfig(dtype=self.dtype, fp8=fp8),
        )


def _shipped(name: str, **changes: object) -> ModelConfig:
    """A shipped model without dropout, GPT-2's vocabulary padded to 50,304 as all of the peers do for speed, and GeLU
    in the tanh form of GPT-2, which all of them have in one kernel (Megatron-core fuses no other with the bias)."""
    model = load(f"models/{name}").config.model
    vocab = 50304 if model.vocab_size == 50257 else model.vocab_size
    activation = "gelu_tanh" if model.activation == "gelu" else model.activation
    fixed = {"vocab_size": vocab, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation": activation, **changes}
    return replace(model, **fixed)  # type: ignore[arg-type]


def rank_shape(name: str, *, tp: int, layers: int, seq: int) -> ModelConfig:
    """Layers of a shipped model as one of ``tp`` ranks sees them: its heads and its part of the MLP."""
    model = _shipped(name)
    return replace(
        model, name=f"{name}/tp{tp}", num_layers=layers, seq_length=seq, head_dim=model.head_size,
        num_attention_heads=model.num_attention_heads // tp, num_query_groups=model.kv_heads // tp,
        ffn_hidden_size=model.ffn_size // tp, vocab_size=128,
    )


def _layers(name: str, tp: int, layers: int, seq: int) -> Size:
    short = name.removeprefix("gpt-")
    whole = f"tp {tp} rank's shape, no communication" if tp > 1 else "whole layers"
    return Size(
        f"{short}-layers-s{seq}", rank_shape(name, tp=tp, layers=layers, seq=seq), micro_batch=max(1, 8192 // seq),
        global_batch=max(1, 8192 // seq), dtype="bf16", layers_only=True, about=f"{layers} layers of {name}, {whole}",
    )


def _experts(size: str, name: str, tokens: int) -> Size:
    """One layer of a shipped model of experts, for the profile: no other peer has it."""
    model = load(f"models/{name}").config.model
    seq = min(model.seq_length, tokens)
    one = replace(model, num_layers=1, vocab_size=128, seq_length=seq, hidden_dropout=0.0, attention_dropout=0.0)
    count = model.moe.num_experts
    return Size(size, one, tokens // seq, tokens // seq, "bf16", True, f"a layer of {count} experts of {name}")


def sizes() -> dict[str, Size]:
    """Name → size. ``tiny``, ``tiny-llama`` and ``quickstart`` are for CPUs, the others for one large GPU."""
    tiny = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256, "seq_length": 32, "num_layers": 2}
    gpt3 = replace(
        _shipped("gpt-22b"), name="gpt-6.7b", num_layers=32, hidden_size=4096, num_attention_heads=32, seq_length=2048
    )
    llama = {"position_embedding": "rope", "normalization": "rmsnorm", "activation": "swiglu", "add_bias": False,
                 "tie_embeddings": False, "num_query_groups": 2, "ffn_hidden_size": 128}
    quick = replace(load("runs/quickstart").config.model, vocab_size=257)
    found = [
        Size("tiny", ModelConfig(name="tiny", **tiny), 2, 4, "fp32", about="for tests"),  # type: ignore[arg-type]
        Size("tiny-bf16", ModelConfig(name="tiny", **tiny), 2, 4, "bf16", about="for tests"),  # type: ignore[arg-type]
        Size("tiny-llama", ModelConfig(name="tiny-llama", **{**tiny, **llama}), 2, 4, "fp32",  # type: ignore[arg-type]
             about="for tests"),
        Size("tiny-gpt2", ModelConfig(name="tiny-gpt2", activation="gelu_tanh", **tiny),  # type: ignore[arg-type]
             2, 4, "fp32", about="for tests, GeLU in its tanh form"),
        Size("tiny-layers", rank_shape("gpt-tiny", tp=2, layers=2, seq=32), 2, 2, "fp32", True, "for tests"),
        Size("tiny-llama-layers", ModelConfig(name="tiny-llama", **{**tiny, **llama}),  # type: ignore[arg-type]
             2, 2, "fp32", True, "for tests"),
        Size("quickstart", quick, 8, 32, "fp32", about="what make quickstart trains"),
        Size("gpt2-124m", _shipped("gpt2-124m"), 16, 64, "bf16", about="GPT-2, 124M"),
        Size("gpt2-xl", _shipped("gpt2-1558m"), 8, 64, "bf16", about="GPT-2 XL, 1.5B"),
        Size("6.7b", gpt3, 2, 32, "bf16", about="GPT-3 6.7B, or as many layers as fit"),
        Size("llama-8b", replace(_shipped("llama-8b"), num_layers=8), 1, 8, "bf16",
             about="8 layers of Llama-3-8B with its vocabulary; --layers 32 where the whole fits"),
        Size("6.7b-layers", replace(gpt3, num_layers=2, vocab_size=128), 4, 4, "bf16", True, "2 layers of GPT-3 6.7B"),
        Size("llama-8b-long", replace(_shipped("llama-8b"), num_layers=2, seq_length=32768, vocab_size=128), 1, 1,
             "bf16", True, "2 layers of Llama-3-8B, 32,768 tokens in one sample"),
        _experts("experts-8", "mixtral-8x7b", 8192), _experts("experts-64", "olmoe-1b-7b", 8192),
        _experts("tiny-experts", "moe-tiny", 64),
    ]
    for seq in (2048, 8192):
        found += [_layers("gpt-22b", 8, 2, seq), _layers("gpt-175b", 8, 1, seq), _layers("gpt-1t", 8, 1, seq),
                  _layers("llama-8b", 1, 2, seq)]
    return {size.name: size for size in found}
