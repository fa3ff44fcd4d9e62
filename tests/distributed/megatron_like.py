"""A GPT with Megatron-DeepSpeed's names and layout on real DeepSpeed: what imports and exports are held against.

Written for these tests from public facts of microsoft/Megatron-DeepSpeed (layer
numbers, parameter names, order of the fused rows, what its ``save_checkpoint``
hands to DeepSpeed); the model is a ``PipelineModule`` over tensor-parallel
slices, and DeepSpeed itself saves and loads.
"""

from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import sample_tokens
from torch import nn

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist.mesh import Topology


class ModelType(enum.Enum):
    """Megatron pickles such enums inside ``args``; importing this module must not be needed to read them."""

    encoder_or_decoder = 1


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.rank, ctx.width = dist.get_rank(group), x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[..., ctx.rank * ctx.width : (ctx.rank + 1) * ctx.width], None


@dataclass
class Cut:
    """Sizes, and this rank's place."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    padded: int
    seq: int
    rank: int
    tp: int
    group: Any
    swiglu: bool

    def parameter(self, name: str, *shape: int, dim: int | None = None, parts: int = 1) -> nn.Parameter:
        """This rank's slice of a whole tensor that is drawn from its name, so that every layout starts alike."""
        seed = sum((i + 1) * ord(c) for i, c in enumerate(name)) % 2**31
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (0.1 if len(shape) > 1 else 0.05)
        if name.endswith("norm.weight"):
            whole += 1.0
        if dim is not None:
            pieces = [p.chunk(self.tp, dim)[self.rank] for p in whole.chunk(parts, dim)]
            whole = torch.cat(pieces, dim)
        made = nn.Parameter(whole.clone())
        made.tensor_model_parallel = dim is not None  # type: ignore[attr-defined]  # DeepSpeed's norm asks for it
        return made


class Linear(nn.Module):
    """Column- (dim 0) or row- (dim 1) parallel; the weight is [out, in]."""

    def __init__(self, cut: Cut, name: str, out: int, into: int, dim: int, parts: int = 1) -> None:
        super().__init__()
        self.cut, self.dim = cut, dim
        self.weight = cut.parameter(f"{name}.weight", out, into, dim=dim, parts=parts)
        self.bias = cut.parameter(f"{name}.bias", out, dim=0 if dim == 0 else None, parts=parts if dim == 0 else 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim == 0:
            return F.linear(_Copy.apply(x, self.cut.group), self.weight, self.bias)
        return _Reduce.apply(F.linear(x, self.weight), self.cut.group) + self.bias


class LayerNorm(nn.LayerNorm):
    def __init__(self, cut: Cut, name: str) -> None:
        super().__init__(cut.hidden, eps=1e-5)
        self.weight, self.bias = (cut.parameter(f"{name}.{s}", cut.hidden) for s in ("weight", "bias"))


class Attention(nn.Module):
    def __init__(self, cut: Cut, name: str) -> None:
        super().__init__()
        self.cut = cut
        d = cut.hidden // cut.heads
        self.query_key_value = Linear(cut, f"{name}.qkv", (cut.heads + 2 * cut.groups) * d, cut.hidden, 0)
        self.dense = Linear(cut, f"{name}.dense", cut.hidden, cut.hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.cut
        d, r = c.hidden // c.heads, c.heads // c.groups
        y = self.query_key_value(x)  # [s, b, (q + 2 kv)/tp]
        y = y.view(*y.shape[:2], c.groups // c.tp, r + 2, d)
        q = y[..., :-2, :].flatten(2, 3)
        k, v = (y[..., i, :].repeat_interleave(r, dim=2) for i in (-2, -1))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, heads, s, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(out.permute(2, 0, 1, 3).flatten(2))


class Mlp(nn.Module):
    def __init__(self, cut: Cut, name: str) -> None:
        super().__init__()
        self.swiglu = cut.swiglu
        # With SwiGLU a rank holds its part of the gate above its part of the up projection.
        parts = 2 if cut.swiglu else 1
        self.dense_h_to_4h = Linear(cut, f"{name}.up", parts * cut.ffn, cut.hidden, 0, parts)
        self.dense_4h_to_h = Linear(cut, f"{name}.down", cut.hidden, cut.ffn, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dense_h_to_4h(x)
        if self.swiglu:
            gate, up = y.chunk(2, dim=-1)
            return self.dense_4h_to_h(F.silu(gate) * up)
        return self.dense_4h_to_h(F.gelu(y, approximate="tanh"))


class ParallelTransformerLayerPipe(nn.Module):
    def __init__(self, cut: Cut, index: int) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(cut, f"{index}.input_norm")
        self.self_attention = Attention(cut, f"{index}.attention")
        self.post_attention_layernorm = LayerNorm(cut, f"{index}.post_norm")
        self.mlp = Mlp(cut, f"{index}.mlp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class EmbeddingPipe(nn.Module):
    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.word_embeddings = nn.Module()
        self.word_embeddings.weight = cut.parameter("word", cut.padded, cut.hidden, dim=0)
        self.position_embeddings: Any = nn.Module()
        self.position_embeddings.weight = cut.parameter("position", cut.seq, cut.hidden)

    @property
    def word_embeddings_weight(self) -> nn.Parameter:
        return self.word_embeddings.weight  # type: ignore[return-value]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.word_embeddings_weight
        local = tokens - self.cut.rank * weight.shape[0]
        mine = (local >= 0) & (local < weight.shape[0])
        rows = F.embedding(local.clamp(0, weight.shape[0] - 1), weight) * mine[..., None]
        x = _Reduce.apply(rows, self.cut.group) + self.position_embeddings.weight[: tokens.shape[1]]
        return x.transpose(0, 1).contiguous()


class LMHeadPipe(nn.Module):
    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut
        self.lm_head: Any = nn.Module()
        self.lm_head.weight = cut.parameter("head", cut.padded, cut.hidden, dim=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return logits(self.cut, self.lm_head.weight, x)


def logits(cut: Cut, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[s, b, padded vocabulary]; the padding is masked here, which Megatron does not do."""
    out = _Gather.apply(F.linear(_Copy.apply(x, cut.group), weight), cut.group)
    mask = torch.zeros(cut.padded, dtype=out.dtype)
    mask[cut.vocab :] = -1e4
    return out + mask


def to_float(x: torch.Tensor) -> torch.Tensor:
    """Layer 0 there is a function too."""
    return x


def loss_of(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.float().transpose(0, 1).flatten(0, 1), labels.flatten())


def arguments(config: RunConfig, topology: Topology, padded: int, samples: int) -> argparse.Namespace:
    """What Megatron-DeepSpeed's ``args`` has of what an import reads, and some that it must not need."""
    m = config.model
    return argparse.Namespace(
        num_layers=m.num_layers, hidden_size=m.hidden_size, num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.kv_heads, kv_channels=m.head_size, ffn_hidden_size=m.ffn_size, padded_vocab_size=padded,
        max_position_embeddings=m.seq_length, seq_length=m.seq_length, add_position_embedding=True,
        use_rotary_position_embeddings=False, normalization="layernorm", layernorm_epsilon=1e-5,
        swiglu=m.activation == "swiglu", bias_gelu_fusion=True, add_bias_linear=True, num_experts=[1],
        untie_embeddings_and_output_weights=not m.tie_embeddings, consumed_train_samples=samples,
        tensor_model_parallel_size=topology.tp, pipeline_model_parallel_size=topology.pp,
        model_type=ModelType.encoder_or_decoder, params_dtype=torch.bfloat16, lr=config.optimizer.lr,
    )


class Source:
    """A run of such a model on this rank."""

    def __init__(self, config: RunConfig, topology: Topology, *, universal: bool = False, scale: float = 1.0) -> None:
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        self.config, self.topology, m = config, topology, config.model
        rank = dist.get_rank()
        group = None
        for start in range(0, topology.world_size, topology.tp):
            made = dist.new_group(list(range(start, start + topology.tp)))
            group = made if start <= rank < start + topology.tp else group
        self.padded = -(-m.vocab_size // (8 * topology.tp)) * 8 * topology.tp
        cut = self.cut = Cut(
            m.num_layers, m.hidden_size, m.num_attention_heads, m.kv_heads, m.ffn_size, m.vocab_size, self.padded,
            m.seq_length, rank % topology.tp, topology.tp, group, m.activation == "swiglu",
        )
        middle = [LayerSpec(ParallelTransformerLayerPipe, cut, i) for i in range(m.num_layers)]
        norm = LayerSpec(LayerNorm, cut, "final_norm")
        ends: tuple[Any, Any]
        if m.tie_embeddings:
            def head(embedding: EmbeddingPipe, x: torch.Tensor) -> torch.Tensor:
                return logits(cut, embedding.word_embeddings_weight, x)

            tied = "word_embeddings_weight"
            ends = (TiedLayerSpec("embed", EmbeddingPipe, cut, tied_weight_attr=tied),
                    TiedLayerSpec("embed", EmbeddingPipe, cut, forward_fn=head, tied_weight_attr=tied))
        else:
            ends = LayerSpec(EmbeddingPipe, cut), LayerSpec(LMHeadPipe, cut)
        deepspeed.init_distributed(dist_init_required=False)
        self.module = PipelineModule(
            layers=[to_float, ends[0], *middle, norm, ends[1]], loss_fn=loss_of, partition_method="type:transformer",
            topology=PipeModelDataParallelTopology(num_pp=topology.pp, num_mp=topology.tp, num_dp=topology.dp),
        )
        if scale != 1.0:  # other weights than any checkpoint's
            with torch.no_grad():
                for p in self.module.parameters():
                    p.mul_(scale)
        self.engine = self._engine(deepspeed, universal)

    def _engine(self, deepspeed: Any, universal: bool) -> Any:
        c = self.config
        every = list(self.module.parameters())
        groups = [
            {"params": [p for p in every if p.dim() > 1], "weight_decay": c.optimizer.weight_decay},
            {"params": [p for p in every if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=c.optimizer.lr, betas=(c.optimizer.beta1, c.optimizer.beta2), eps=c.optimizer.eps
        )
        micro = c.batch.global_batch_size // (c.batch.micro_batch_size * self.topology.dp)
        settings = {
            "train_micro_batch_size_per_gpu": c.batch.micro_batch_size, "gradient_accumulation_steps": micro,
            "steps_per_print": 10**9, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # 0.19.8 clips at 1.0 if nothing is said
            "data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": c.precision.dtype == "bf16"},
            "pipeline": {"use_reentrant": False}, "checkpoint": {"load_universal": universal},
        }
        return deepspeed.initialize(model=self.module, optimizer=optimizer, config=settings)[0]

    def batches(self, step: int) -> Any:
        """(tokens, labels) of this replica's micro-batches, by our data law."""
        c, replica = self.config, self.module.mpu().get_data_parallel_rank()
        b, total = c.batch.micro_batch_size, c.batch.global_batch_size
        for m in range(total // (b * self.topology.dp)):
            start = step * total + (m * self.topology.dp + replica) * b
            tokens = torch.stack([sample_tokens(c, start + i)[0] for i in range(b)])
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def train(self, steps: range) -> list[float]:
        """The loss of each step."""
        return [float(self.engine.train_batch(data_iter=self.batches(step))) for step in steps]

    def save(self, folder: Path, step: int) -> None:
        """As Megatron-DeepSpeed's ``save_checkpoint`` does."""
        samples = step * self.config.batch.global_batch_size
        client = {
            "args": arguments(self.config, self.topology, self.padded, samples), "checkpoint_version": 3.0,
            "iteration": step, "tokens": samples * self.config.model.seq_length,
        }
        self.engine.save_checkpoint(str(folder), client_state=client)

    def state(self) -> dict[tuple[str, str], torch.Tensor]:
        """(parameter's name, kind) → this rank's slice in fp32, through DeepSpeed's own accessors; collective."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        zero = self.engine.optimizer
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            # 0.19.8 links states after the first group's step and finds none for the others.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
        out = {}
        for name, p in self.module.named_parameters():
            out[name, "weight"] = safe_get_full_fp32_param(p).detach().clone().view(p.shape)
            for kind in ("exp_avg", "exp_avg_sq"):
                out[name, kind] = safe_get_full_optimizer_state(p, kind).detach().clone().view(p.shape)
        return out
