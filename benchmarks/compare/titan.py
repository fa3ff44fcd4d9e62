"""torchtitan (release 0.2): its Llama with each layer compiled, fused AdamW and its own clipping. It has no GPT-2 or
GPT-3 block. On one device its trainer uses neither FSDP nor DDP, but autocast."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare.peer import About, Unable, need
from benchmarks.compare.plain import decay_groups
from benchmarks.compare.sizes import OPTIMIZER, Size
from benchmarks.compare.weights import Weights


def _interleaved(rows: Tensor, d: int) -> Tensor:
    """Its rotary pairs elements 2i and 2i + 1 of a head, ours i and i + d/2."""
    heads = rows.view(-1, 2, d // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


@torch.no_grad()
def fill(model: Any, weights: Weights) -> None:
    """Take the common weights."""
    m = weights.model
    model.tok_embeddings.weight.copy_(weights.read("embedding.word.weight"))
    model.output.weight.copy_(weights.read("head.weight"))
    model.norm.weight.copy_(weights.read("final_norm.weight"))
    for i, layer in enumerate(model.layers.values()):
        name = f"layers.{i}"
        q, k, v = weights.qkv(f"{name}.attention.qkv.weight")
        layer.attention.wq.weight.copy_(_interleaved(q, m.head_size))
        layer.attention.wk.weight.copy_(_interleaved(k, m.head_size))
        layer.attention.wv.weight.copy_(v)
        layer.attention.wo.weight.copy_(weights.read(f"{name}.attention.output.weight"))
        gate, up = weights.read(f"{name}.mlp.up.weight")
        layer.feed_forward.w1.weight.copy_(gate)
        layer.feed_forward.w3.weight.copy_(up)
        layer.feed_forward.w2.weight.copy_(weights.read(f"{name}.mlp.down.weight"))
        layer.attention_norm.weight.copy_(weights.read(f"{name}.norm1.weight"))
        layer.ffn_norm.weight.copy_(weights.read(f"{name}.norm2.weight"))


def model_of(size: Size, weights: Weights) -> Any:
    """Its Transformer with the common weights, fp32, layers not yet compiled."""
    args = need("torchtitan.models.llama3.model.args", " (release 0.2, which needs triton)")
    llama = need("torchtitan.models.llama3.model.model")
    m = size.model
    if m.head_size * m.num_attention_heads != m.hidden_size:
        raise Unable("its heads are hidden size / heads")
    wanted = args.TransformerModelArgs(
        dim=m.hidden_size, n_layers=m.num_layers, n_heads=m.num_attention_heads, n_kv_heads=m.kv_heads,
        vocab_size=m.vocab_size, norm_eps=m.norm_epsilon, rope_theta=m.rope_theta, max_seq_len=m.seq_length,
        multiple_of=32, ffn_dim_multiplier=(m.ffn_size - 16) / int(8 * m.hidden_size / 3),
        rope_scaling_args=args.RoPEScalingArgs(scaling_factor=1.0),
    )
    with weights.device, torch.no_grad():
        model = llama.Transformer(wanted)
        model.init_weights(buffer_device=weights.device)
    found = next(iter(model.layers.values())).feed_forward.w1.weight.shape[0]
    if found != m.ffn_size:
        raise Unable(f"its MLP would have {found} features, not {m.ffn_size}")
    fill(model, weights)
    return model


class Training:
    """Whole optimizer steps."""

    def __init__(self, size: Size, weights: Weights, device: torch.device) -> None:
        self.size, self.about = size, About({"compile": "each layer", "attention": "sdpa", "optimizer": "AdamW fused"})
        self.model = model_of(size, weights)
        if device.type == "cuda":
            for layer in self.model.layers.values():
                layer.compile(fullgraph=True)
        else:
            self.about.settings["compile"] = "off"
            self.about.handicap = "torchtitan is made for GPUs; not compiled here"
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model), lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps,
            fused=True,
        )
        self.clip = need("torchtitan.distributed.utils").clip_grad_norm_
        self.loss: Any = need("torchtitan.components.loss").cross_entropy_loss
        if device.type == "cuda":
            self.loss = torch.compile(self.loss)
        self.cast: Any = torch.autocast(device.type, torch.bfloat16) if size.dtype == "bf16" else nullcontext()

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See ``peer.Step``."""
        total: Any = 0.0
        self.optimizer.zero_grad()
        for tokens, labels in zip(inputs.split(self.size.micro_batch), targets.split(self.size.micro_batch)):
            with self.cast:
                loss = self.loss(self.model(tokens), labels) / targets.numel()  # it sums over tokens
            loss.backward()
            total = total + loss.detach()
        norm = self.clip(list(self.model.parameters()), OPTIMIZER.clip_grad, foreach=True)
        self.optimizer.step()
        return total, norm


def build(size: Size, weights: Weights, device: torch.device) -> Training:
    """See ``peer.build``."""
    if size.family != "llama":
        raise Unable("torchtitan has Llama-like models, no GPT with learned positions, LayerNorm and biases")
    if size.layers_only:
        raise Unable("its layers alone are not set up here; whole models only")
    return Training(size, weights, device)
