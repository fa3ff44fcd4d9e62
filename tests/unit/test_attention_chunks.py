"""Attention within chunks: the formula written token by token, transformers' mask, and tokens through the caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_port.core.config.checks import problems
from megatron_port.core.config.layout import with_values
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.mixers.chunks import chunk_starts
from megatron_port.run.same_model import model_differences
from megatron_port.tools.compress.selection import Sizes, pruned_model
from megatron_port.tools.inference.cache import CacheSlot, KeyValueCache
from megatron_port.tools.interop.hf_config import family_for

SEQ, BATCH = 19, 2
MODEL = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, num_query_groups=2, vocab_size=53, seq_length=SEQ,
    activation="swiglu", normalization="rmsnorm", position_embedding="rope", add_bias=False, tie_embeddings=False,
    ffn_hidden_size=32, attention_chunk=5, attention_pattern=("chunk", "full"),
)
LATENT: dict[str, Any] = {
    "num_query_groups": 0, "head_dim": 8, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "v_head_dim": 6,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "capped, with sinks": {"attention_softcap": 1.5, "attention_sinks": True},
    "latents": LATENT, "longer than the sequence": {"attention_chunk": 64},
    "of one token": {"attention_chunk": 1},
}
DOCUMENTS = torch.tensor([[0] * 3 + [3] * 9 + [12] * 7, [0] * 5 + [5] * 1 + [6] * 13], dtype=torch.int32)


def stage_of(model: ModelConfig) -> GPTStage:
    """A stage of all layers in fp64, with random weights."""
    ctx = ParallelContext.single()
    stream = DropoutStream(0, ctx.device)
    stream.enabled = False
    stage = GPTStage(BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ctx, providers=torch_providers(),
        step=StepSlot(stream), dtype=torch.float64,
    ), start=0, stop=model.num_layers).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return stage


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, model: ModelConfig, starts: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Each query's keys are of its chunk and its document, up to itself."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[1]):
        for h in range(q.shape[2]):
            group = h // (q.shape[2] // k.shape[2])
            for i in range(q.shape[0]):
                seen = [j for j in range(i + 1) if j // model.attention_chunk == i // model.attention_chunk
                        and (starts is None or j >= starts[b, i])]
                scores = torch.stack([q[i, b, h] @ k[j, b, group] for j in seen]) / q.shape[-1] ** 0.5
                if model.attention_softcap:
                    scores = model.attention_softcap * (scores / model.attention_softcap).tanh()
                weights = scores.exp() / (scores.exp().sum() + (0.0 if sinks is None else sinks[h].exp()))
                out[i, b, h] = sum(w * v[j, b, group] for w, j in zip(weights, seen, strict=True))
    return out.flatten(2)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_is_its_formula(variant: str, documents: bool) -> None:
    model = replace(MODEL, **VARIANTS[variant])
    stage = stage_of(model)
    assert stage.embedding is not None
    step = stage.embedding.residual.step
    step.announce(0, (0, 1), document_starts=DOCUMENTS if documents else None)
    chunked, full = (layer.attention for layer in stage.layers)
    assert isinstance(chunked, SelfAttention) and isinstance(full, SelfAttention)
    assert chunked.spec.chunk == model.attention_chunk and full.spec.chunk == 0
    x = torch.randn(SEQ, BATCH, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    arguments = chunked.split(chunked.project(x))
    given = [t.detach().clone().requires_grad_() for t in arguments]
    mine = chunked._attend_with_dropout(*given)
    hand = [t.detach().clone().requires_grad_() for t in arguments]
    exact = by_hand(hand[0], hand[1], hand[2], model, DOCUMENTS if documents else None, chunked.sinks)
    assert (mine - exact).abs().max() <= 1e-12
    weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for one, other in zip(torch.autograd.grad(mine, given, weights), torch.autograd.grad(exact, hand, weights)):
        assert (one - other).abs().max() <= 1e-12


def test_the_mask_is_transformers() -> None:
    """Llama 4's, whose chunks begin at multiples of their size."""
    transformers = pytest.importorskip("transformers")
    from transformers.masking_utils import create_chunked_causal_mask

    config = transformers.Llama4TextConfig(
        num_hidden_layers=1, hidden_size=24, attention_chunk_size=5, attn_implementation="eager", vocab_size=53,
        pad_token_id=None,
    )
    x = torch.randn(BATCH, SEQ, 24)
    theirs = create_chunked_causal_mask(
        config=config, inputs_embeds=x, attention_mask=None, past_key_values=None,
        position_ids=torch.arange(SEQ).expand(BATCH, SEQ),
    )
    attention = stage_of(MODEL).layers[0].attention
    assert isinstance(attention, SelfAttention)
    mask = attention._mask(SEQ, torch.empty(SEQ, BATCH, 1))
    assert mask is not None
    visible = mask.visible(SEQ, SEQ, torch.device("cpu"))
    assert torch.equal(visible.expand(BATCH, 1, SEQ, SEQ), (theirs == 0).expand(BATCH, 1, SEQ, SEQ))


@pytest.mark.parametrize("variant", ["plain", "capped, with sinks", "latents"])
def test_tokens_through_the_caches_are_those_of_whole_sequences(variant: str) -> None:
    stage, slot, cache = stage_of(replace(MODEL, **VARIANTS[variant])), CacheSlot(), KeyValueCache(SEQ)
    tokens = torch.randint(0, 53, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        whole = stage(tokens)
        slot.install(stage)
        cache.lengths = torch.tensor([7, 7])
        with slot.using(cache):
            stage(tokens[:, :7])
            for at in range(7, SEQ):
                cache.at([at, at], torch.device("cpu"))
                assert (stage(tokens[:, at : at + 1])[0] - whole[at]).abs().max() <= 1e-12, at


def test_scores_are_counted_within_chunks() -> None:
    layer = model_spec(replace(MODEL, seq_length=20)).layers[0].mixer.attention
    assert layer is not None and layer.scores_seen(20) == 20 * 5 == layer.scores_seen(20, document=12.0)
    assert layer.scores_seen(20, document=4.0) == 20 * 4 and layer.is_masked(20) and not layer.is_masked(5)


def test_a_pattern_and_its_size_go_together() -> None:
    base = with_values(RunConfig(model=MODEL), {"data.synthetic": True, "precision.dtype": "fp32"})
    assert not problems(base)
    for change in ({"model.attention_chunk": 0}, {"model.attention_pattern": ("full",)}):
        (said,) = problems(with_values(base, change))
        assert said.startswith("model.attention_chunk is ") and "give both" in said
    assert "cannot serve attention within chunks" in " ".join(problems(with_values(base, {"backend.attention": "fa3"})))


def test_patterns_have_many_forms_and_follow_pruned_layers() -> None:
    deep = replace(MODEL, num_layers=4)
    assert not model_differences(replace(deep, attention_pattern=("chunk", "full") * 2), deep)
    assert model_differences(replace(deep, attention_chunk=6), deep)
    mixed = replace(deep, attention_pattern=("chunk", "window", "full", "chunk"), sliding_window=3)
    left = pruned_model(mixed, Sizes(), (1, 3))
    assert (left.attention_pattern, left.attention_chunk, left.sliding_window) == (("window", "chunk"), 5, 3)
    left = pruned_model(mixed, Sizes(), (1, 2))
    assert (left.attention_pattern, left.attention_chunk, left.sliding_window) == (("window", "full"), 0, 3)
    with pytest.raises(Exception, match="llama needs .*attention_chunk = 0"):
        family_for(MODEL)


def test_a_chunk_begins_no_document() -> None:
    x = torch.empty(SEQ, BATCH, 1)
    found = chunk_starts(DOCUMENTS, SEQ, x, 5)
    assert found[0].tolist() == [0, 0, 0, 3, 3, *[5] * 5, 10, 10, 12, 12, 12, *[15] * 4]
    assert found.dtype == torch.int32 and found.is_contiguous() and chunk_starts(None, SEQ, x, 5).is_contiguous()
