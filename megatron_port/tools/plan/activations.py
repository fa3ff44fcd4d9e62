"""Bytes and seconds of what one layer keeps of one micro-batch, site by site.

Bytes follow Korthikanti et al. (arXiv 2205.05198), section 4: for GPT in 16 bits with dropout a layer keeps s·b·h·34
bytes, of which 24 are split by tensor parallelism and all by sequence parallelism, plus 5·a·s²·b/t of attention scores
unless attention is fused. ``tests/unit/test_activation_sites.py`` measures each site on a real layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_port.core.model.activation_sites import SITES, decided
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.ops import Site
from megatron_port.core.model.spec import AttentionSpec, LayerSpec, NormSpec
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.head_memory import uses_tables
from megatron_port.tools.plan.meter import metered_bytes


def site_bytes(case: Case, layer: LayerSpec | None = None, *, scores: bool = True) -> dict[Site, float]:
    """Return the bytes that each site of a layer keeps of one micro-batch between forward and backward on a rank.

    Own kernels draw masks again and keep none; torch's ops keep them in the compute dtype, the input of an RMSNorm and
    its result in fp32 and SwiGLU's sigmoid branch as well, and under rotary positions the packed projection. Where a
    torch op keeps a copy in place of its argument (RMSNorm's in fp32, GeLU's with the bias), that much of the copy is
    counted as the argument: it is kept when the copy is dropped.

    Args:
        layer: None: the model's first.
        scores: with the scores of attention; False: as under selective recompute.
    """
    m, t, w = case.model, case.tp, case.width
    layer = layer or model_spec(m).layers[0]
    attention = layer.mixer.attention
    if attention is None:
        return metered_bytes(case, layer)
    torchs = case.kernels == "torch"
    tokens, stream = stream_of(case)
    mask = {"own": 0, "torch": w}.get(case.kernels, 1) * (m.hidden_dropout > 0)
    wide = 2 * case.wide - w if torchs else 0  # of an RMSNorm, in place of its input
    inputs = stream * w

    def copied(norm: NormSpec) -> float:
        return stream * wide * (norm.kind == "rmsnorm")

    def norm(spec: NormSpec | None) -> float:
        return 0.0 if spec is None else inputs + copied(spec)

    def post(spec: NormSpec | None) -> float:
        """Bytes of a branch's result, which its norm keeps."""
        return 0.0 if spec is None else stream * w + copied(spec)

    def between(rank: int) -> float:
        """Bytes of what the second of two factors reads, which tensor-parallel ranks hold alike or by tokens."""
        return rank * w * (tokens / t if case.sequence_parallel else tokens)

    gate = layer.dense.down.inputs if layer.dense.keeps_gate(torchs) else 0
    return {
        "input": stream * w,
        "norm1": norm(layer.norm1),
        "qkv": tokens / t * _qkv_bytes(case, attention, wide) + between(layer.mixer.entry_rank),
        "core": tokens / t * (_mixed_features(attention) * w + _core_bytes(case, attention, scores)),
        # Where the norms read the same tensor, there is no second one.
        "residual": stream * (mask + (0 if layer.parallel_residual else w)) + post(layer.post_norm1)
        + between(layer.mixer.output.rank),
        "norm2": norm(layer.norm2),
        "hidden": tokens / t * layer.dense.up.kept_features(t) * w
        + between(layer.dense.up.rank),
        "activation": tokens / t * (layer.dense.down.kept_features(t) + gate) * w,
        "output": stream * mask + post(layer.post_norm2) + between(layer.dense.down.rank),
    }


def layer_activation_bytes(case: Case, recompute: str | None = None, layer: LayerSpec | None = None) -> float:
    """Return the bytes that one layer keeps of one micro-batch between its forward and its backward on a rank.

    ``recompute`` None: the case's; ``layer`` None: the model's first.
    """
    recompute = case.recompute if recompute is None else recompute
    found = site_bytes(case, layer, scores=recompute == "none")
    return found["input"] if recompute == "full" else sum(found[site] for site in SITES)


@dataclass(frozen=True)
class Away:
    """Bytes of one micro-batch in one layer that are not on the device between its forward and its backward pass."""

    recomputed: float = 0.0
    swapped: float = 0.0
    partitioned: float = 0.0
    """In whole; each tensor-parallel rank keeps its part of it."""
    ranks: int = 1

    @property
    def saved(self) -> float:
        """Bytes that the device does not hold meanwhile."""
        return self.recomputed + self.swapped + self.partitioned * (1 - 1 / self.ranks)


def away(case: Case, start: int, stop: int) -> list[Away]:
    """Return what each of layers [start, stop), a chunk, does not keep."""
    out, layers = [], model_spec(case.model).layers
    for index in range(start, stop):
        # What came from another stage is held by whoever received it, for its gradient.
        decisions = {
            site: how for site, how in decided(case.dropped[index]).decisions.items()
            if not (site == "input" and index == start > 0)
            and not (how == "partition" and not case.partitions)
        }
        sizes = site_bytes(case, layers[index]) if decisions else {}
        total = dict.fromkeys(("recompute", "swap", "partition"), 0.0)
        for site, how in decisions.items():
            total[how] += sizes[site]
        for site, (reader, copy) in copied_sites(case, layers[index]).items():
            ours, theirs = decisions.get(site, "keep"), decisions.get(reader, "keep")
            # The copy goes where its reader's go; the original is saved only where the reader runs again from it.
            if theirs in ("swap", "partition") and ours != theirs:
                total[theirs] += copy
            if theirs != "recompute" and ours in ("swap", "partition") and ours != theirs:
                total[ours] -= copy
        out.append(Away(total["recompute"], total["swap"], total["partition"], case.tp))
    return out


def copied_sites(case: Case, layer: LayerSpec) -> dict[Site, tuple[Site, float]]:
    """Return sites of which only a copy is saved, by the operation that reads them: site → (its reader, bytes)."""
    if case.kernels != "torch":
        return {}
    sizes, stream = site_bytes(case, layer), stream_of(case)[1] * case.width
    out: dict[Site, tuple[Site, float]] = {}
    if case.width != case.wide:
        readers: tuple[tuple[Site, Site, NormSpec | None], ...] = (
            ("input", "norm1", layer.norm1), ("residual", "norm2", layer.norm2)
        )
        for site, reader, norm in readers:
            rms = norm is not None and norm.kind == "rmsnorm"
            if rms and not (site == "residual" and layer.parallel_residual):
                out[site] = reader, stream
    if not layer.dense.gated and layer.dense.up.bias:
        out["hidden"] = "activation", sizes["hidden"]
    return out


def stream_of(case: Case) -> tuple[float, float]:
    """Tokens of a micro-batch, and elements of its residual stream on a rank (split under sequence parallelism)."""
    tokens = case.model.seq_length / case.cp * case.micro_batch
    return tokens, tokens * case.model.hidden_size * (1 / case.tp if case.sequence_parallel else 1)


def _qkv_bytes(case: Case, attention: AttentionSpec, wide: int) -> float:
    """Bytes per token, over all tensor-parallel ranks, of queries, keys and values and of what their norms and their
    rotation keep."""
    t, w, heads = case.tp, case.width, attention.groups
    out: float = attention.packed_features(t) * w
    copies = 1 if case.sequence_parallel else t
    out += sum(norm.size for norm in attention.latent_norms) * (2 * w + wide) * copies  # each latent, and its norm
    if case.kernels == "torch" and uses_tables(case.model, attention):
        out += heads.head_size * heads.held(t) * w  # rotated keys; v is a view that keeps the whole projection alive
        out += 4 * case.model.rotary_size * w / case.micro_batch * t  # the tables, in the compute dtype
    if attention.norms_over_ranks and t > 1:  # a function that keeps no wide copies
        wide = 0
    return out + attention.normalized_features(t) * (w + wide)


def _mixed_features(attention: AttentionSpec) -> int:
    """Elements per token of the mixed values: what the output projection keeps, and where values were padded what
    attention gave."""
    inputs = attention.output.inputs
    return inputs if attention.value_size == attention.groups.head_size else inputs + attention.mixed_features


def _core_bytes(case: Case, attention: AttentionSpec, scores: bool) -> float:
    """Bytes per token, over all tensor-parallel ranks, that attention keeps beside its arguments and its result."""
    m, w, heads = case.model, case.width, attention.groups
    # Keys and values of all positions, which are gathered again where the scores are recomputed.
    rows = case.cp > 1 and case.cp_method == "gather"
    gathered = 2 * case.cp * heads.held(case.tp) * heads.head_size * w if rows else 0
    if case.flash:
        return gathered + heads.heads * (8 if case.drops_inside else 4)  # log-sum-exp of each row; own: two numbers
    if not scores:
        return 0.0
    dropped = 1 if m.attention_dropout > 0 else 0
    # The own softmax knows no masks: torch's takes its place there.
    masked = (attention.is_masked(m.seq_length) or rows) and case.kernels in ("own", "torch")
    torchs = case.kernels == "torch" or masked
    mask = w if torchs else {"own": 0}.get(case.kernels, 1)
    wide = case.wide if torchs and w != case.wide else 0  # softmax in fp32
    capped = case.wide if attention.softcap else 0
    each = w + wide + capped + dropped * (mask if torchs else w + mask)
    each += w if rows else 0  # rows that see no key are masked once more
    scaled = heads.head_size * w if case.kernels == "torch" else 0  # queries
    return gathered + heads.heads * (m.seq_length * each + scaled)
