"""Our GPT-2 and Llama give transformers' logits: an oracle that nobody here wrote.

Weights are scaled by 5: at the usual 0.02 even a wrong activation changes the
logits by only 1e-5. max|Δ| ÷ max|logit| must be under 1e-6 in fp32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_port.backend.providers import torch_providers
from megatron_port.config.schema import LayoutConfig, ModelConfig
from megatron_port.model.build import BuildContext
from megatron_port.model.gpt import GPTStage
from megatron_port.parallel.context import ParallelContext
from megatron_port.parallel.random import DropoutStream
from megatron_port.parallel.record import record_of

transformers = pytest.importorskip("transformers")
BOUND = 1e-6


def build(model: ModelConfig, dtype: torch.dtype = torch.float32) -> GPTStage:
    ctx = ParallelContext.single()
    context = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=8), ctx=ctx, providers=torch_providers(),
        stream=DropoutStream(0, ctx.device), dtype=dtype,
    )
    return GPTStage(context, start=0, stop=model.num_layers).eval()


def fill(stage: GPTStage, weights: dict[str, torch.Tensor]) -> None:
    """Set every parameter by canonical name; a missing or left-over name fails."""
    left = dict(weights)
    with torch.no_grad():
        for p in stage.parameters():
            record = record_of(p)
            p.zero_()
            record.local_view(p).copy_(left.pop(record.name).reshape(record.shape))
    assert not left, f"unused: {sorted(left)}"


def fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, d: int) -> torch.Tensor:
    """[heads*d, …], [groups*d, …] twice → rows ordered by group: its queries, its key, its value."""
    parts = [t.reshape(groups, -1, d, *t.shape[1:]) for t in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def scaled(reference: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if p.dim() == 1 and "bias" not in name:
                p.copy_(1.0 + 0.3 * torch.randn(p.shape, generator=generator))
            else:
                p.copy_(5 * 0.02 * torch.randn(p.shape, generator=generator))
    return {n: p.detach() for n, p in reference.named_parameters()}


def deviation(stage: GPTStage, reference: torch.nn.Module, vocab: int) -> float:
    tokens = torch.randint(0, vocab, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = reference(tokens).logits
        ours = stage(tokens).transpose(0, 1)[..., :vocab]
    return float((ours - theirs).abs().max() / theirs.abs().max())


def gpt2_reference(activation: str) -> Any:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=64, n_head=4, vocab_size=101, n_positions=32, activation_function=activation,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config).eval()


def gpt2_weights(w: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    out = {
        "embedding.word.weight": w["transformer.wte.weight"], "embedding.position.weight": w["transformer.wpe.weight"],
        "final_norm.weight": w["transformer.ln_f.weight"], "final_norm.bias": w["transformer.ln_f.bias"],
    }
    for i in range(layers):
        theirs, ours = f"transformer.h.{i}", f"layers.{i}"
        for suffix in ("weight", "bias"):
            out[f"{ours}.norm1.{suffix}"] = w[f"{theirs}.ln_1.{suffix}"]
            out[f"{ours}.norm2.{suffix}"] = w[f"{theirs}.ln_2.{suffix}"]
            fused = w[f"{theirs}.attn.c_attn.{suffix}"]
            q, k, v = (fused.t() if fused.dim() == 2 else fused).chunk(3, 0)
            out[f"{ours}.attention.qkv.{suffix}"] = fuse_qkv(q, k, v, 4, 16)
            for a, b in (("attention.output", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
                t = w[f"{theirs}.{b}.{suffix}"]
                out[f"{ours}.{a}.{suffix}"] = t.t() if t.dim() == 2 else t
    return out


@pytest.mark.parametrize("theirs,ours", [("gelu", "gelu"), ("gelu_new", "gelu_tanh")])
def test_gpt2(theirs: str, ours: str) -> None:
    reference = gpt2_reference(theirs)
    stage = build(ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=4, vocab_size=101, seq_length=32,
                              activation=ours))
    fill(stage, gpt2_weights(scaled(reference), 3))
    assert deviation(stage, reference, 101) <= BOUND


def test_a_wrong_activation_is_seen() -> None:
    """The bound can fail: erf GeLU in place of the tanh form exceeds it."""
    reference = gpt2_reference("gelu_new")
    stage = build(ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=4, vocab_size=101, seq_length=32))
    fill(stage, gpt2_weights(scaled(reference), 3))
    assert deviation(stage, reference, 101) > 10 * BOUND


@pytest.mark.parametrize("groups,tied", [(4, False), (2, True), (1, False)])
def test_llama(groups: int, tied: bool) -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=groups, intermediate_size=96,
        vocab_size=101, max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    w = scaled(reference)
    out = {"embedding.word.weight": w["model.embed_tokens.weight"], "final_norm.weight": w["model.norm.weight"]}
    if not tied:
        out["head.weight"] = w["lm_head.weight"]
    for i in range(3):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        out[f"{ours}.norm1.weight"] = w[f"{theirs}.input_layernorm.weight"]
        out[f"{ours}.norm2.weight"] = w[f"{theirs}.post_attention_layernorm.weight"]
        q, k, v = (w[f"{theirs}.self_attn.{n}_proj.weight"] for n in "qkv")
        out[f"{ours}.attention.qkv.weight"] = fuse_qkv(q, k, v, groups, 16)
        out[f"{ours}.attention.output.weight"] = w[f"{theirs}.self_attn.o_proj.weight"]
        out[f"{ours}.mlp.up.weight"] = torch.stack([w[f"{theirs}.mlp.{n}_proj.weight"] for n in ("gate", "up")])
        out[f"{ours}.mlp.down.weight"] = w[f"{theirs}.mlp.down_proj.weight"]
    stage = build(ModelConfig(
        num_layers=3, hidden_size=64, num_attention_heads=4, num_query_groups=groups, ffn_hidden_size=96,
        vocab_size=101, seq_length=32, position_embedding="rope", normalization="rmsnorm", activation="swiglu",
        add_bias=False, tie_embeddings=tied,
    ))
    fill(stage, out)
    assert deviation(stage, reference, 101) <= BOUND
