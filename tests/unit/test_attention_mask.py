"""What queries see and what happens to their scores: every provider against the definition, query by query, in fp64."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_port.core.dist.positions import Positions, Run
from megatron_port.core.layers.attention import Attention, AttentionMask, key_ends, math_attention
from megatron_port.core.layers.fused import torch_causal_softmax, torch_split_rotary
from megatron_port.ext.context.attention import mask_of_rows
from megatron_port.ext.kernels import kernels
from megatron_port.ext.kernels.ops import attention as own
from megatron_port.ext.kernels.packed_documents import pack_documents
from megatron_port.ext.kernels.packed_math import packed_math_attention
from megatron_port.ext.kernels.torch_attention import flash_attention, sdpa_attention, varlen_attention

SEQ, BATCH, HEADS, GROUPS, SIZE = 13, 2, 4, 2, 6
STARTS = torch.tensor([[0, 0, 0, 3, 4, 4, 4, 4, 4, 9, 9, 9, 12], [0, 1, 1, 1, 1, 1, 1, 1, 8, 8, 8, 8, 8]],
                      dtype=torch.int32)
"""Documents of one token at the front, in the middle and at the end; another division in the second sample."""
ALL = tuple(range(SEQ))
Tensors = tuple[torch.Tensor, ...]


def given(seed: int = 0) -> Tensors:
    """q, k, v and sinks in fp64, scores far enough from 0 that a cap of 1 bends them."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((SEQ, BATCH, HEADS, SIZE), *[(SEQ, BATCH, GROUPS, SIZE)] * 2, (HEADS,))
    return tuple(torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, *, window: int = 0,
    softcap: float = 0.0, starts: torch.Tensor | None = None, queries: tuple[int, ...] = ALL,
    keys: tuple[int, ...] = ALL,
) -> torch.Tensor:
    """Attention of queries and keys at these positions (rows of q and of k), each query by itself."""
    rows = []
    for row, i in enumerate(queries):
        for b, head in itertools.product(range(q.shape[1]), range(q.shape[2])):
            first = 0 if starts is None else int(starts[b, i])
            seen = [n for n, j in enumerate(keys) if first <= j <= i and (not window or j > i - window)]
            group = head // (q.shape[2] // k.shape[2])
            scores = [(q[row, b, head] @ k[n, b, group]) / SIZE**0.5 for n in seen]
            scores = [softcap * torch.tanh(x / softcap) for x in scores] if softcap else scores
            column = [] if sinks is None else [sinks[head]]
            if not seen:
                rows.append(torch.zeros(SIZE, dtype=q.dtype))
                continue
            weights = torch.softmax(torch.stack([*scores, *column]), 0)[: len(seen)]
            rows.append(sum(w * v[n, b, group] for w, n in zip(weights, seen)))
    return torch.stack(rows).view(len(queries), q.shape[1], -1)


def results(function: Callable[..., torch.Tensor], inputs: Tensors, dtype: torch.dtype = torch.float64) -> Tensors:
    """The result, and the gradients of all inputs."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return (out.detach(), *torch.autograd.grad(out, leaves, weights.to(dtype)))


def close(mine: Tensors, wanted: Tensors, bound: float) -> None:
    for number, (a, b) in enumerate(zip(mine, wanted, strict=True)):
        assert float((a.double() - b).abs().max()) <= bound * max(1.0, float(b.abs().max())), number


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask) -> torch.Tensor:
    y = torch.cat((q.unflatten(2, (GROUPS, -1)), k.unsqueeze(3), v.unsqueeze(3)), dim=3)
    return own.packed_attention(y, mask=mask)


def packed_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: AttentionMask) -> torch.Tensor:
    y = torch.stack((q, *(x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))), dim=3)
    return packed_math_attention(torch_causal_softmax, torch_split_rotary)(y, mask=mask)


MASKS: dict[str, dict[str, Any]] = {
    "window 1": {"window": 1}, "window": {"window": 4}, "documents": {"starts": STARTS}, "cap": {"softcap": 1.0},
    "all": {"window": 3, "starts": STARTS, "softcap": 0.7},
}


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_own_and_math_are_the_definition(name: str, with_sinks: bool) -> None:
    kernels.load("cpu")
    options = MASKS[name]
    first = options.get("starts")

    def masked(function: Any) -> Callable[..., torch.Tensor]:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
            mask = AttentionMask(
                options.get("window", 0), options.get("softcap", 0.0), sinks[0] if sinks else None, first
            )
            out: torch.Tensor = function(q, k, v, mask=mask)
            return out

        return call

    def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        return by_definition(q, k, v, sinks[0] if sinks else None, **options)

    inputs = given()[: 4 if with_sinks else 3]
    exact = results(wanted, inputs)
    for function in (math_attention, packed_math):
        close(results(masked(function), inputs), exact, 1e-12)
    for function in (own.attention, packed):
        close(results(masked(function), inputs, torch.float32), exact, 2e-6)


RUNS: dict[str, tuple[tuple[int, ...], int]] = {
    "two runs, every key": ((*range(2, 5), *range(9, 13)), 0), "later keys": (ALL, 5), "a late run": ((7, 8), 8),
}
"""(positions of the queries, position of the first key). Queries before the first key see nothing."""


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("name", ["window", "all"])
def test_queries_and_keys_at_other_positions(name: str, runs: str) -> None:
    """As ranks that divide a sequence have them; what no key is left for is zeros, with gradients of zero."""
    kernels.load("cpu")
    (queries, from_key), options = RUNS[runs], MASKS[name]
    keys, places = tuple(range(from_key, SEQ)), torch.tensor(queries)
    starts = options.get("starts", torch.zeros_like(STARTS))
    q, k, v, sinks = given()
    inputs = q[places], k[from_key:], v[from_key:], sinks

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        mask = AttentionMask(
            options["window"], options.get("softcap", 0.0), sinks, starts[:, places].contiguous() - from_key,
            key_ends(places, from_key),
        )
        return (own.attention if q.dtype == torch.float32 else math_attention)(q, k, v, mask=mask)

    exact = results(lambda *x: by_definition(*x, **options, queries=queries, keys=keys), inputs)
    close(results(call, inputs), exact, 1e-12)
    close(results(call, inputs, torch.float32), exact, 2e-6)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """flash-attn's function by its documentation: [b, s, heads, d]; a window of (left, right) keys beside the own; the
    last query sees the last key."""
    left, right = options.get("window_size", (-1, -1))
    assert options["causal"] and right in (-1, 0)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    keys = tuple(range(k.shape[0]))
    out = by_definition(
        q, k, v, None, window=left + 1, softcap=options.get("softcap", 0.0), queries=keys[-q.shape[0] :], keys=keys
    )
    return out.view(q.shape).transpose(0, 1)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """The same for sequences one after the other, [tokens, heads, d]."""
    parts = []
    for of in "qk":
        offsets = options.pop(f"cu_seqlens_{of}")
        assert offsets.dtype == torch.int32 and options.pop(f"max_seqlen_{of}") == int(offsets.diff().max())
        parts.append(list(itertools.pairwise(offsets.tolist())))
    return torch.cat([
        flash(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0] for (a, b), (c, d) in zip(*parts, strict=True)
    ])


def torchs_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's ``varlen_attn`` by its documentation: the same, causal by a window that ends with the query."""
    assert window_size[1] == 0 and enable_gqa == (query.shape[1] != key.shape[1])
    return varlen(query, key, value, cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k, max_seqlen_q=max_q,
                  max_seqlen_k=max_k, causal=True, window_size=window_size)


def providers_of_masks() -> dict[str, Attention]:
    """Providers other than own and math, with what they call replaced by the definition."""
    return {"sdpa": sdpa_attention(), "flash_attn": flash_attention(flash, varlen),
            "varlen": varlen_attention(torchs_varlen)}


def test_torchs_and_flash_attn_get_what_they_take() -> None:
    """torch's attention, of both kinds, serves windows and documents; flash-attn a soft-cap too."""
    packed = pack_documents(STARTS, STARTS.device)
    assert packed.offsets.tolist() == [0, 3, 4, 9, 12, 13, 14, 21, 26] and packed.offsets.dtype == torch.int32
    assert packed.longest == 7
    providers = providers_of_masks()
    for (name, attention), options in itertools.product(providers.items(), MASKS.values()):
        mask = AttentionMask(
            options.get("window", 0), options.get("softcap", 0.0), None, options.get("starts"),
            documents=functools.partial(pack_documents, STARTS, STARTS.device),
        )
        inputs = given()[:3]
        if name != "flash_attn" and mask.softcap:
            with pytest.raises(ValueError, match=f"{name} does not support soft-capped scores"):
                attention(*inputs, mask=mask)
            continue
        exact = results(lambda q, k, v, o=options: by_definition(q, k, v, None, **o), inputs)
        close(results(lambda *x, a=attention, m=mask: a(*x, mask=m), inputs), exact, 1e-12)
    for name, attention in providers.items():
        with pytest.raises(ValueError, match=f"{name} does not support attention sinks"):
            attention(*given()[:3], mask=AttentionMask(sinks=given()[3]))
    with pytest.raises(ValueError, match="not causal takes no AttentionMask"):
        math_attention(*given()[:3], causal=False, mask=AttentionMask(window=2))
    with pytest.raises(ValueError, match="needs flash_attn_varlen_func"):
        flash_attention(flash)(*given()[:3], mask=AttentionMask(first=STARTS))


@pytest.mark.parametrize("name", ["window", "documents", "both"])
def test_the_installed_torch_takes_what_varlen_attention_gives_it(name: str) -> None:
    """Its own operator, forward and backward, on tensors without numbers: there is no kernel of it for CPUs."""
    attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    meta = torch.device("meta")
    q, k, v = (x.detach().to(meta, torch.bfloat16).requires_grad_() for x in given()[:3])
    packed = pack_documents(STARTS, STARTS.device)
    packed = dataclasses.replace(packed, offsets=packed.offsets.to(meta))
    mask = AttentionMask(
        0 if name == "documents" else 3, first=None if name == "window" else STARTS, documents=lambda: packed
    )
    out = varlen_attention(attn)(q, k, v, mask=mask)
    assert out.shape == (q.shape[0], q.shape[1], q.shape[2] * q.shape[3]) and out.dtype == torch.bfloat16
    out.backward(torch.empty_like(out))
    assert q.grad is not None and k.grad is not None and k.grad.shape == k.shape


HELD = (Positions.contiguous(3, 2), Positions((Run(0, 2), Run(5, 6))), Positions((Run(3, 1), Run(8, 2), Run(11, 2))))
"""Positions whose queries a rank has, as runs that begin in the middle of documents and at their first tokens."""


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("name", ["none", *MASKS])
def test_runs_of_queries_in_a_longer_sequence(name: str, held: Positions) -> None:
    """As context-parallel ranks have them, for providers that take neighbours: one call for each run, or one for the
    runs in each document. Without a list of the runs they refuse."""
    options = MASKS.get(name, {})
    index = held.index(STARTS.device)
    starts = options.get("starts")
    documents = None if starts is None else functools.partial(pack_documents, starts, starts.device)
    whole = AttentionMask(options.get("window", 0), options.get("softcap", 0.0), None, starts, documents=documents)
    mask = mask_of_rows(whole, held, STARTS.device)
    q, k, v, _ = given()
    places = tuple(index.tolist())
    wanted = results(lambda q, k, v: by_definition(q, k, v, None, **options, queries=places), (q[index], k, v))
    providers = providers_of_masks()
    for attention in [providers[n] for n in providers if n == "flash_attn" or not whole.softcap]:
        close(results(functools.partial(attention, mask=mask), (q[index], k, v)), wanted, 1e-12)
        unlisted = dataclasses.replace(mask, runs=None, first=None, documents=None)
        with pytest.raises(ValueError, match=r"need AttentionMask\.runs"):
            attention(q[index], k, v, mask=unlisted)
        with pytest.raises(ValueError, match=r"reach to key \d+ of 4"):
            attention(q[index], k[:4], v[:4], mask=dataclasses.replace(mask, first=None, documents=None))


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_sinks_and_caps_are_transformers(family: str) -> None:
    """Its attention modules, a window included: values and gradients, of the sinks too, in fp64 (own kernel: fp32)."""
    transformers = pytest.importorskip("transformers")
    from hf_models import in_double
    from transformers.masking_utils import create_sliding_window_causal_mask

    kernels.load("cpu")
    config = transformers.CONFIG_MAPPING[family](
        hidden_size=HEADS * SIZE, num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=SIZE,
        sliding_window=5, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=SIZE, attn_logit_softcapping=1.5, attn_implementation="eager",
    )
    name = {"gpt_oss": "GptOssAttention", "gemma2": "Gemma2Attention"}[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(module, name)(config, layer_idx=0).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(BATCH, SEQ, HEADS * SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    unrotated = torch.ones(BATCH, SEQ, SIZE).double(), torch.zeros(BATCH, SEQ, SIZE).double()
    if family == "gpt_oss":
        unrotated = unrotated[0][..., : SIZE // 2], unrotated[1][..., : SIZE // 2]
    hidden = create_sliding_window_causal_mask(
        config=config, inputs_embeds=x, attention_mask=None, past_key_values=None,
        position_ids=torch.arange(SEQ).expand(BATCH, SEQ),
    )
    cap, leaves = (1.5 if family == "gemma2" else 0.0), [x, *([theirs.sinks] if family == "gpt_oss" else [])]

    def run(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> Tensors:
        inputs = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        out = function(*inputs)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
        return (out.detach(), *torch.autograd.grad(out, inputs, weights))

    def oracle(x: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        given = {"sinks": sinks[0]} if sinks else {}
        with in_double(theirs):
            out: torch.Tensor = torch.func.functional_call(
                theirs, given, (x,), {"position_embeddings": unrotated, "attention_mask": hidden}
            )[0]
        return out

    def ours(x: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        layer = copy.deepcopy(theirs).to(x.dtype)
        q, k, v = (
            p(x).view(BATCH, SEQ, -1, SIZE).transpose(0, 1) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        mask = AttentionMask(5, cap, sinks[0] if sinks else None)
        out = (own.attention if x.dtype == torch.float32 else math_attention)(q, k, v, mask=mask)
        return layer.o_proj(out.transpose(0, 1))  # type: ignore[no-any-return]

    wanted = run(oracle, torch.float64)
    close(run(ours, torch.float64), wanted, 1e-12)
    close(run(ours, torch.float32), wanted, 1e-5)
