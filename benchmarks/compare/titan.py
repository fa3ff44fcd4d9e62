"""torchtitan (release 0.2): its Llama with each layer compiled, fused AdamW and its own clipping, or its layers alone.
It has no GPT-2 or GPT-3 block. On one device its trainer uses neither FSDP nor DDP, but autocast."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compare.peer import About, Unable, autocast_dtype, gradient_norm, need
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
    model.tok_embeddings.weight.copy_(weights.read("embedding.word.weight"))
    model.output.weight.copy_(weights.read("head.weight"))
    model.norm.weight.copy_(weights.read("final_norm.weight"))
    for i, layer in enumerate(model.layers.values()):
        fill_layer(layer, weights, f"layers.{i}")


@torch.no_grad()
def fill_layer(layer: Any, weights: Weights, name: str) -> None:
    """Take layer ``name``'s weights."""
    m = weights.model
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


def _found() -> tuple[Any, Any]:
    """Its modules of the model and of the model's arguments."""
    args = need("torchtitan.models.llama3.model.args", " (release 0.2 with its requirements, triton among them)")
    return need("torchtitan.models.llama3.model.model"), args


def _arguments(size: Size) -> Any:
    """Its description of the model."""
    args, m = _found()[1], size.model
    if m.head_size * m.num_attention_heads != m.hidden_size:
        raise Unable("its heads are hidden size / heads")
    return args.TransformerModelArgs(
        dim=m.hidden_size, n_layers=m.num_layers, n_heads=m.num_attention_heads, n_kv_heads=m.kv_heads,
        vocab_size=m.vocab_size, norm_eps=m.norm_epsilon, rope_theta=m.rope_theta, max_seq_len=m.seq_length,
        multiple_of=32, ffn_dim_multiplier=(m.ffn_size - 16) / int(8 * m.hidden_size / 3),
        rope_scaling_args=args.RoPEScalingArgs(scaling_factor=1.0),
    )


def _same_width(layer: Any, size: Size) -> None:
    found = layer.feed_forward.w1.weight.shape[0]
    if found != size.model.ffn_size:
        raise Unable(f"its MLP would have {found} features, not {size.model.ffn_size}")


def model_of(size: Size, weights: Weights) -> Any:
    """Its Transformer with the common weights, fp32, layers not yet compiled."""
    llama, wanted = _found()[0], _arguments(size)
    with weights.device, torch.no_grad():
        model = llama.Transformer(wanted)
        model.init_weights(buffer_device=weights.device)
    _same_width(next(iter(model.layers.values())), size)
    fill(model, weights)
    return model


class Layers:
    """Forward and backward of its blocks in their own dtype, each compiled."""

    def __init__(self, size: Size, weights: Weights, device: torch.device) -> None:
        self.about = About({"compile": "each layer", "attention": "sdpa", "optimizer": "not used"})
        llama, wanted, m = _found()[0], _arguments(size), size.model
        with device:
            blocks = [llama.TransformerBlock(i, wanted) for i in range(m.num_layers)]
            self.rope = llama.precompute_freqs_cis(m.head_size, m.seq_length, m.rope_theta, wanted.rope_scaling_args)
        self.stack = nn.ModuleList(blocks).to(autocast_dtype(size))
        for i, block in enumerate(self.stack):
            _same_width(block, size)
            fill_layer(block, weights, f"layers.{i}")
            if device.type == "cuda":
                block.compile(fullgraph=True)
        if device.type == "cpu":
            self.about.settings["compile"] = "off"
            self.about.handicap = "torchtitan is made for GPUs; not compiled here"

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See ``peer.Step``."""
        self.stack.zero_grad(set_to_none=True)
        y = x = inputs.transpose(0, 1).contiguous().requires_grad_()
        for block in self.stack:
            y = block(y, self.rope, None)
        y.backward(targets.transpose(0, 1))
        return y.transpose(0, 1), x.grad.transpose(0, 1)  # type: ignore[union-attr]

    def gradient_norm(self) -> Tensor:
        """See ``peer.LayerStep``."""
        return gradient_norm(self.stack)


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


def build(size: Size, weights: Weights, device: torch.device) -> Training | Layers:
    """See ``peer.build``."""
    if size.family != "llama":
        raise Unable("torchtitan has Llama-like models, no GPT with learned positions, LayerNorm and biases")
    if size.layers_only:
        return Layers(size, weights, device)
    return Training(size, weights, device)
