"""GPT and Llama in plain torch, the way short training scripts are written: batch first, scaled_dot_product_attention,
autocast, fused AdamW; with and without torch.compile over the whole model; and all in bf16 as CUDA graphs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compare.peer import About, StackStep, Unable, autocast_dtype
from benchmarks.compare.sizes import OPTIMIZER, Size
from benchmarks.compare.weights import Weights
from megatron_port.core.config.schema import ModelConfig


def _norm(m: ModelConfig) -> nn.Module:
    if m.normalization == "rmsnorm":
        return nn.RMSNorm(m.hidden_size, eps=m.norm_epsilon)
    return nn.LayerNorm(m.hidden_size, eps=m.norm_epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[b, heads, s, d], halves rotated against each other."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    """Pre-norm layer, [b, s, h] → [b, s, h]."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.m = m
        h, d, bias = m.hidden_size, m.head_size, m.add_bias
        self.norm1, self.norm2 = _norm(m), _norm(m)
        self.qkv = nn.Linear(h, d * (m.num_attention_heads + 2 * m.kv_heads), bias=bias)
        self.output = nn.Linear(d * m.num_attention_heads, h, bias=bias)
        wide = m.ffn_size * (2 if m.activation == "swiglu" else 1)
        self.up, self.down = nn.Linear(h, wide, bias=bias), nn.Linear(m.ffn_size, h, bias=bias)

    def attention(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Causal, grouped queries where the model has them."""
        b, s, _ = x.shape
        m, d = self.m, self.m.head_size
        y = self.qkv(x).split([d * m.num_attention_heads, d * m.kv_heads, d * m.kv_heads], dim=-1)
        q, k, v = (t.view(b, s, -1, d).transpose(1, 2) for t in y)
        if rope is not None:
            q, k = (rotate(t, *(r.to(t.dtype) for r in rope)) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=m.kv_heads != m.num_attention_heads)
        return self.output(out.transpose(1, 2).reshape(b, s, -1))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), rope)
        y = self.up(self.norm2(x))
        if self.m.activation == "swiglu":
            gate, up = y.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(y, approximate="tanh" if self.m.activation == "gelu_tanh" else "none"))


class Stack(nn.Module):
    """The layers, with their rotary tables."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(m) for _ in range(m.num_layers))
        self.rope = m.position_embedding == "rope"
        if self.rope:
            d = m.head_size
            frequency = m.rope_theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
            angle = torch.arange(m.seq_length, dtype=torch.float64)[:, None] * frequency
            self.register_buffer("cos", angle.cos().float(), persistent=False)
            self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rope = (self.cos, self.sin) if self.rope else None
        for layer in self.layers:
            x = layer(x, rope)
        return x


class GPT(nn.Module):
    """Tokens and labels [b, s] → mean loss."""

    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.m = m
        self.word = nn.Embedding(m.vocab_size, m.hidden_size)
        self.position = nn.Embedding(m.seq_length, m.hidden_size) if m.position_embedding == "learned" else None
        self.stack, self.norm = Stack(m), _norm(m)
        self.head = nn.Linear(m.hidden_size, m.vocab_size, bias=False)
        if m.tie_embeddings:
            self.head.weight = self.word.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.word(tokens)
        if self.position is not None:
            x = x + self.position.weight[: tokens.shape[1]]
        logits = self.head(self.norm(self.stack(x)))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


@torch.no_grad()
def fill_block(block: Block, weights: Weights, name: str) -> None:
    """Take layer ``name``'s weights."""
    kinds = ["weight", "bias"] if block.m.add_bias else ["weight"]
    for kind in kinds:
        getattr(block.qkv, kind).copy_(torch.cat(weights.qkv(f"{name}.attention.qkv.{kind}")))
        getattr(block.up, kind).copy_(weights.read(f"{name}.mlp.up.{kind}").view_as(getattr(block.up, kind)))
        getattr(block.output, kind).copy_(weights.read(f"{name}.attention.output.{kind}"))
        getattr(block.down, kind).copy_(weights.read(f"{name}.mlp.down.{kind}"))
    for norm in ("norm1", "norm2"):
        for kind, p in getattr(block, norm).named_parameters():
            p.copy_(weights.read(f"{name}.{norm}.{kind}"))


@torch.no_grad()
def fill(model: GPT, weights: Weights) -> None:
    """Take the common weights."""
    model.word.weight.copy_(weights.read("embedding.word.weight"))
    if model.position is not None:
        model.position.weight.copy_(weights.read("embedding.position.weight"))
    if not model.m.tie_embeddings:
        model.head.weight.copy_(weights.read("head.weight"))
    for i, block in enumerate(model.stack.layers):
        fill_block(block, weights, f"layers.{i}")  # type: ignore[arg-type]
    for kind, p in model.norm.named_parameters():
        p.copy_(weights.read(f"final_norm.{kind}"))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices only."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


class Training:
    """fp32 parameters under autocast, gradients added up over micro-batches."""

    def __init__(self, size: Size, weights: Weights, device: torch.device, compiled: str, about: About) -> None:
        self.size, self.about = size, about
        with torch.device(device):
            self.model = GPT(size.model)
        fill(self.model, weights)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model), lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps,
            fused=True,
        )
        self.run: Any = torch.compile(self.model, mode=compiled) if compiled else self.model
        # Graphs write their results, gradients too, to the same memory each time: sums need memory of their own.
        self.own_sums = compiled == "max-autotune"
        if self.own_sums:
            for p in self.parameters:
                p.grad = torch.zeros_like(p)
        low = size.dtype != "fp32"
        self.cast: Any = torch.autocast(device.type, autocast_dtype(size)) if low else nullcontext()
        self.passes = size.global_batch // size.micro_batch

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See ``peer.Step``."""
        total: Any = 0.0
        for tokens, labels in zip(inputs.split(self.size.micro_batch), targets.split(self.size.micro_batch)):
            if self.own_sums:
                torch.compiler.cudagraph_mark_step_begin()
            with self.cast:
                loss = self.run(tokens, labels) / self.passes
            loss.backward()
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(self.parameters, OPTIMIZER.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.own_sums)
        return total, norm


class NarrowTraining:
    """Weights, sums of gradients and moments in bf16; on a GPU a step is two CUDA graphs, one for the passes of a
    micro-batch and one for the update. The least that a step can move, at the price of its rounding."""

    def __init__(self, size: Size, weights: Weights, device: torch.device, about: About) -> None:
        self.size, self.about, self.graphs = size, about, device.type == "cuda"
        with torch.device(device):
            self.model = GPT(size.model)
        fill(self.model, weights)
        self.model.to(autocast_dtype(size))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model), lr=torch.tensor(OPTIMIZER.lr, device=device),
            betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps, fused=True, capturable=self.graphs,
        )
        self.passes = size.global_batch // size.micro_batch
        shape = (size.micro_batch, size.model.seq_length)
        self.inputs = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2)]
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.loss, self.norm = torch.zeros((), device=device), torch.zeros((), device=device)
        self.accumulate, self.update = self._accumulate, self._update
        if self.graphs:
            self.accumulate, self.update = self._recorded()

    def _accumulate(self) -> None:
        """Passes of the micro-batch that ``inputs`` holds."""
        loss = self.model(*self.inputs) / self.passes
        loss.backward()
        self.loss += loss.detach()

    def _update(self) -> None:
        self.norm.copy_(nn.utils.clip_grad_norm_(self.parameters, OPTIMIZER.clip_grad))
        self.optimizer.step()

    def _recorded(self) -> tuple[Any, Any]:
        """Record both; what warming up does to gradients is set to zero, and the state is put back."""
        before = [p.detach().clone() for p in self.parameters]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._accumulate()
                self._update()
        torch.cuda.current_stream().wait_stream(stream)
        passes, update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(passes):
            self._accumulate()
        with torch.cuda.graph(update, pool=passes.pool()):
            self._update()
        with torch.no_grad():
            for p, value in zip(self.parameters, before):
                p.copy_(value)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        return passes.replay, update.replay

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See ``peer.Step``."""
        torch._foreach_zero_([self.loss, *(p.grad for p in self.parameters)])  # type: ignore[list-item]
        for tokens, labels in zip(inputs.split(self.size.micro_batch), targets.split(self.size.micro_batch)):
            self.inputs[0].copy_(tokens)
            self.inputs[1].copy_(labels)
            self.accumulate()
        self.update()
        return self.loss.clone(), self.norm.clone()


class Layers(StackStep):
    """Forward and backward of a stack in its own dtype."""

    def __init__(self, size: Size, weights: Weights, device: torch.device, compiled: str, about: About) -> None:
        self.about = about
        with torch.device(device):
            self.stack = Stack(size.model).to(autocast_dtype(size))
        for i, block in enumerate(self.stack.layers):
            fill_block(block, weights, f"layers.{i}")  # type: ignore[arg-type]
        self.run: Any = torch.compile(self.stack, mode=compiled) if compiled else self.stack


def build(
    size: Size, weights: Weights, device: torch.device, *, compile: str, narrow: bool = False
) -> Training | NarrowTraining | Layers:
    """See ``peer.build``."""
    if narrow:
        if size.layers_only or size.dtype != "bf16":
            raise Unable("whole steps in bf16 only: its weights have no fp32 masters")
        favour = "no fp32 masters or sums: 8 bytes a parameter in place of 18, and updates are rounded to bf16"
        graphs = device.type == "cuda"
        about = About({"compile": "off", "attention": "sdpa", "optimizer": "AdamW fused", "precision": "all bf16",
                       "graphs": "passes, update" if graphs else "off"}, "" if graphs else "no graphs on a CPU", favour)
        return NarrowTraining(size, weights, device, about)
    about = About({"compile": compile or "off", "attention": "sdpa",
                   "optimizer": "not used" if size.layers_only else "AdamW fused"})
    if size.dtype != "fp32":
        about.settings["precision"] = "weights in bf16" if size.layers_only else "fp32 weights, autocast bf16"
    kind = Layers if size.layers_only else Training
    return kind(size, weights, device, compile, about)
