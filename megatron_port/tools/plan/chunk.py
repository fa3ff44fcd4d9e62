"""Bytes of one micro-batch's passes through a chunk: its units' programs (``plan.meter``), run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.ops import Site
from megatron_port.core.model.spec import AttentionSpec, LayerSpec, NormSpec, PredictionSpec
from megatron_port.core.pipeline.schedules import Kind
from megatron_port.ext.experts.spec import moe_of
from megatron_port.ext.memory.sites import SITES, decided
from megatron_port.ext.mixers.gated_spec import GatedAttentionSpec
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.engines import ADAMW
from megatron_port.tools.plan.meter import layer, metered_bytes, uses_tables
from megatron_port.tools.plan.operations import (
    Block,
    Meter,
    Sizes,
    Tape,
    Value,
    drop,
    leave,
    linear,
    matrix,
    normalize,
    product,
)

# Memory of the embedding, the head and the loss as programs over blocks (``plan.operations``); of layers:
# ``plan.meter``.

LOSS_CHUNK = 1 << 22
"""Logits that torch's cross-entropy takes at a time (``backend.cross_entropy``)."""


def token_rows(t: Tape, s: Sizes) -> Value:
    """``layers.embedding.VocabParallelEmbedding``. Its tokens are not counted."""
    table = model_spec(s.case.model).embedding.word.local_numel(s.case.tp, s.case.padded_vocab) * s.case.width
    whole, native = s.whole, s.case.engine.name == "native"
    widened = whole * s.ratio if s.ratio > 1 and s.case.kernels == "torch" else 0.0

    def of_table(grad: Block, saved: list[Block]) -> list[Block | None]:
        if native and t.defers:
            t.defer(grad)
        elif native:
            t.meter.need(widened)  # rows are added to the sums
        else:
            t.meter.need(table, s.widening * table)
        return []

    x = t.note(t.block(whole), [], of_table, trains=not s.case.fine_tuning.enabled)
    if s.case.tp > 1:
        x = t.note(t.block(whole), [x], lambda grad, saved: [t.block(whole)])
        x = leave(t, s, x)
    return x


def embedding(t: Tape, s: Sizes) -> Value:
    """``model.layers.Embedding``: rows of the table, positions, dropout."""
    spec, w = model_spec(s.case.model).embedding, s.case.width
    x = token_rows(t, s)
    if spec.position is not None:
        positions = spec.position.numel * w

        def of_positions(grad: Block, saved: list[Block]) -> list[Block | None]:
            t.meter.need(positions, s.widening * positions)
            return [grad]

        x = t.note(t.block(x.size), [x], of_positions)
    if s.case.model.hidden_dropout > 0:
        if s.torch:
            return drop(t, s, x)
        masks = [t.block(x.size / w * s.mask)] if s.mask else []
        size = x.size
        return t.note(t.block(size), [x], lambda grad, saved: [t.block(size)], masks)
    return x


def _softcap(t: Tape, logits: Value) -> Value:
    """``Head.capped``: the hyperbolic tangent stays for its backward pass."""
    size = logits.size
    divided = t.note(t.block(size), [logits], lambda grad, saved: [t.block(size)])
    tanh = t.block(size)
    bent = t.note(tanh, [divided], lambda grad, saved: [t.block(size)], [tanh])
    del divided
    return t.note(t.block(size), [bent], lambda grad, saved: [t.block(size)])


def head(t: Tape, s: Sizes, x: Value) -> tuple[Value, Value]:
    """``model.layers.Head``: (the normed hidden states, the loss of the logits)."""
    normed = normalize(t, s, x, model_spec(s.case.model).head.norm)[0]
    return normed, logits_loss(t, s, normed)


def _chunked_loss(t: Tape, s: Sizes, normed: Value) -> Value:
    """``memory.chunked_head``: the logits of one chunk of tokens after the other, forward and again backward."""
    case = s.case
    w, whole, gathers, capped = case.width, s.whole, case.sequence_parallel, case.model.logits_softcap > 0
    rows = min(max(case.head_chunk // case.micro_batch, 1) * case.micro_batch, s.tokens)
    columns, hidden, torchs = case.padded_vocab / case.tp, case.model.hidden_size, case.kernels != "own"
    weight, logits, part = columns * hidden * w, rows * columns * w, rows * hidden * w
    wide = min(rows * columns, LOSS_CHUNK) * case.wide if torchs else 0.0

    def made() -> Block:
        """The logits of a chunk; while they are capped there are two more of them."""
        made = product(t, s, part, weight, logits)
        t.meter.need(2 * logits * capped)
        return made

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        full = t.block(whole) if gathers else saved[0]
        total = t.block(whole)
        held = [made()]
        kept = [t.block(logits), t.block(logits)] if capped else []  # the hyperbolic tangent, and what is capped
        t.meter.need(wide if s.ratio > 1 else 0.0)
        t.meter.need(2 * logits * capped)
        del kept
        held.append(product(t, s, logits, weight, part))
        held.pop()
        if not case.fine_tuning.enabled:
            t.meter.need(s.widening * logits, s.widening * part)
        del held, full
        return [t.block(whole / case.tp) if gathers else total]

    gathered = t.block(whole) if gathers else None
    held = made()
    t.meter.need(*([wide] * (2 if s.ratio > 1 else 1)))
    del held, gathered
    statistics = t.block(s.tokens * case.wide * 2)
    return t.note(t.block(s.tokens * case.wide), [normed], backward, [normed.block, statistics])


def logits_loss(t: Tape, s: Sizes, normed: Value) -> Value:
    """Logits and their loss, whose gradient is written over them."""
    case = s.case
    if case.head_chunk:
        return _chunked_loss(t, s, normed)
    logits = matrix(
        t, s, normed, case.model.hidden_size, case.padded_vocab / case.tp, bias=0.0, entry=True
    )
    del normed
    if case.model.logits_softcap > 0:
        logits = _softcap(t, logits)
    elements = logits.size / case.width
    wide = elements * 4 if case.engine.copies_logits else min(elements, LOSS_CHUNK) * case.wide
    torchs = case.kernels != "own" or case.engine.copies_logits

    def backward(grad: Block, saved: list[Block]) -> list[Block | None]:
        if torchs and s.ratio > 1:
            t.meter.need(wide)
        return [saved[0]]

    if torchs:
        t.meter.need(*([wide] * (2 if s.ratio > 1 and not case.engine.copies_logits else 1)))
    statistics = t.block(s.tokens * case.wide * 2)
    return t.note(t.block(s.tokens * case.wide), [logits], backward, [logits.block, statistics])


def prediction(t: Tape, s: Sizes, part: PredictionSpec, hidden: Value) -> tuple[Value, Value]:
    """A module that predicts further tokens: its hidden states and its loss; ``hidden``: of the depth before."""
    embedded = normalize(t, s, token_rows(t, s), part.embedding_norm)[0]
    hidden = normalize(t, s, hidden, part.hidden_norm)[0]
    # Each takes its half of the gradient, which is a view.
    both = t.note(t.block(embedded.size + hidden.size), [embedded, hidden], lambda grad, saved: [grad, grad])
    del embedded, hidden
    x = layer(t, s, part.layer, linear(t, s, both, part.projection))
    del both
    found = normalize(t, s, x, part.norm)[0]
    return found, logits_loss(t, s, found)


# Bytes and seconds of what one layer keeps of one micro-batch, site by site.
#
# Bytes follow Korthikanti et al. (arXiv 2205.05198), section 4: for GPT in 16 bits with dropout a layer keeps
# s·b·h·34 bytes, of which 24 are split by tensor parallelism and all by sequence parallelism, plus 5·a·s²·b/t of
# attention scores unless attention is fused. ``tests/unit/test_activation_sites.py`` measures each site on a real
# layer.

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
    if attention is None or attention is not layer.mixer:
        return _metered(case, layer)
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

    found: dict[Site, float] = {
        "input": stream * w,
        "norm1": norm(layer.norm1),
        "qkv": tokens / t * _qkv_bytes(case, attention, wide) + between(layer.mixer.entry_rank),
        "core": tokens / t * (_mixed_features(attention) * w + _core_bytes(case, attention, scores)),
        # Where the norms read the same tensor, there is no second one.
        "residual": stream * (mask + (0 if layer.parallel_residual else w)) + post(layer.post_norm1)
        + between(layer.mixer.output.rank),
        "norm2": norm(layer.norm2), "hidden": 0.0, "activation": 0.0, "output": 0.0,
    }
    if not layer.mlp.linears:
        return found
    gate = layer.dense.down.inputs if layer.dense.keeps_gate(torchs) else 0
    return found | {
        "hidden": tokens / t * layer.dense.up.kept_features(t) * w
        + between(layer.dense.up.rank),
        "activation": tokens / t * (layer.dense.down.kept_features(t) + gate) * w,
        "output": stream * mask + post(layer.post_norm2) + between(layer.dense.down.rank),
    }


def _metered(case: Case, layer: LayerSpec) -> dict[Site, float]:
    """Return what the meter counts, of copies in an RMSNorm that much as its argument."""
    found, argument = metered_bytes(case, layer), stream_of(case)[1] * case.width
    norms: tuple[tuple[Site, Site, NormSpec | None], ...] = (
        ("input", "norm1", layer.norm1), ("residual", "norm2", layer.norm2)
    )
    for site, reader, norm in norms if case.kernels == "torch" and case.width != case.wide else ():
        if norm is not None and norm.kind == "rmsnorm" and not (site == "residual" and layer.parallel_residual):
            found[site] += argument
            found[reader] -= argument
    return found


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
    if layer.mlp.linears and not layer.dense.gated and layer.dense.up.bias and layer.dense.activation != "relu2":
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
    out += attention.mixed_features * w * isinstance(attention, GatedAttentionSpec)  # the gates
    out += sum(norm.size for norm in attention.latent_norms) * (2 * w + wide) * copies  # each latent, and its norm
    if case.kernels == "torch" and uses_tables(case.model, attention):
        out += heads.head_size * heads.held(t) * w  # rotated keys; v is a view that keeps the whole projection alive
        out += 4 * case.model.rotary_size * w / case.micro_batch * t  # the tables, in the compute dtype
    if attention.norms_over_ranks and t > 1:  # a function that keeps no wide copies
        wide = 0
    return out + attention.normalized_features(t) * (w + wide)


def _mixed_features(attention: AttentionSpec) -> int:
    """Elements per token of the mixed values: what the output projection keeps, and where values were padded what
    attention gave, as it does where they are gated."""
    inputs = attention.output.inputs
    if isinstance(attention, GatedAttentionSpec):
        return 2 * inputs
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


ALIKE = 3
"""Layers of one kind in a row that are run; each further one holds as much as the second of them."""


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of a chunk's passes for one micro-batch."""

    stream: float
    """An input, an output or a gradient of one."""
    output: float
    """The output where it is held with its graph; none where that ends in the loss."""
    kept: float
    """Held from the forward pass to the backward pass, input and output left out."""
    logits: float
    """The part of ``kept`` that is logits."""
    deferred: float
    """Held from a split backward pass to its weight pass."""
    layers: float
    """Allocated by the backward passes of layers, those of embedding and head left out."""
    layer_left: float
    """Bytes after a layer's backward pass, less those before."""
    working: dict[Kind, float]
    """Allocated by each kind of pass beyond what it finds, its results included."""


@dataclass
class _Unit:
    """One unit's part in a run of a chunk, in bytes."""

    more: int
    """Units alike that were not run."""
    kept: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    left: float = 0.0
    """Bytes after its backward pass, results included, less those before."""


def _alike(case: Case) -> Case:
    """A case with the same passes as ``case``, and as others."""
    return replace(
        case, pp=1, vp=1, dp=1, shard=0, split=(), schedule="1f1b", zero_stage=0, reshard="forward", bucket=1,
        global_batch=1, micro_batches=1, rule=ADAMW, offload="none", offload_weights=False, dropped=(),
        imbalance=1.0,
        ep=case.ep if case.on_cpu else min(case.ep, 2),  # a CPU widens the weights of a product
    )


def layer_bytes(case: Case, index: int) -> float:
    """Return the bytes that a layer keeps of one micro-batch between forward and backward, its input included."""
    run = _run(_alike(case), index, index + 1, False, False, False)
    return run.kept + run.stream


def chunk_bytes(case: Case, start: int, stop: int, splits: bool) -> ChunkBytes:
    """Return the bytes of layers [start, stop), with the embedding and the head where they are at the ends."""
    layers = case.model.num_layers
    alike = _alike(case)
    first, last = start == 0, stop == layers
    elsewhere = away(case, start, stop) if case.dropped else []
    more = 0
    if _all_alike(case.model):  # then it does not matter which layers they are, and a few are run for any number
        more = max(stop - start - ALIKE, 0)
        start, stop = 0, stop - start - more
    else:
        start, stop = _first_like(case.model, start, stop)
    found = _chunk_bytes(_run(alike, start, stop, first, last, splits), more)
    if case.ep > 1 and case.imbalance > 1:
        return _uneven(found, _more_rows(alike, case.imbalance, start, stop))
    if not case.dropped:
        return found
    none, full = (
        _chunk_bytes(_run(replace(alike, recompute=policy), start, stop, False, False, splits), more)
        for policy in ("none", "full")
    )
    return _without(found, elsewhere, none, full, first=first)


@lru_cache(maxsize=256)
def _all_alike(model: ModelConfig) -> bool:
    return len(model_spec(model).kinds()) == 1


@lru_cache(maxsize=4096)
def _first_like(model: ModelConfig, start: int, stop: int) -> tuple[int, int]:
    """Return the first layers of the same kinds in the same order, so that they are run once."""
    layers, count = [id(layer) for layer in model_spec(model).layers], stop - start
    first = next(i for i in range(start + 1) if layers[i : i + count] == layers[start:stop])
    return first, first + count


def _uneven(found: ChunkBytes, more: float) -> ChunkBytes:
    """Return the bytes of a chunk on a rank that has most rows in the layer that runs, ``more`` bytes. In the layers
    that wait it has the mean: which rank has most differs from layer to layer."""
    passes = {kind: size + (more if kind is not Kind.WEIGHT else 0.0) for kind, size in found.working.items()}
    return replace(found, working=passes)


@lru_cache(maxsize=4096)
def _more_rows(alike: Case, imbalance: float, start: int, stop: int) -> float:
    """Bytes that a layer of experts keeps beyond those of a balanced one, the most of layers [start, stop)."""
    layers = model_spec(alike.model).layers[start:stop]
    kinds = {id(layer): start + i for i, layer in enumerate(layers) if moe_of(layer) is not None}
    cases = [replace(alike, recompute="none", imbalance=x) for x in (imbalance, 1.0)]
    kept = [[_run(case, i, i + 1, False, False, False).kept for case in cases] for i in kinds.values()]
    return max((uneven - even for uneven, even in kept), default=0.0)


def _without(
    found: ChunkBytes, elsewhere: list[Away], none: ChunkBytes, full: ChunkBytes, *, first: bool
) -> ChunkBytes:
    """Return the bytes of a chunk whose layers do not keep all that they made.

    It comes back for the backward pass of the layer, what is swapped while the layer above runs. In the layer's forward
    pass there is no more than without any recompute, nor more than with full recompute and what is kept; what is
    swapped or partitioned is there in whole, and what the layer before it swaps, as well. ``none``, ``full``: of the
    layers alone; ``first``: the embedding is in front of them.
    """
    layers, forward = len(elsewhere), Kind.FORWARD
    each = none.kept / layers, full.kept / layers
    alone = [one.working[forward] - (layers - 1) * kept for one, kept in zip((none, full), each)]
    most = max(each[0] - each[1] - (alone[0] - alone[1]), 0.0)
    before = [0.0, *(a.swapped for a in elsewhere)]
    at_layers, gone = 0.0, 0.0
    for i, (one, behind) in enumerate(zip(elsewhere, before)):
        missing = max(one.recomputed - most, 0.0) - behind
        at_layers = max(at_layers, none.working[forward] - (layers - 1 - i) * each[0] - gone - missing)
        gone += one.saved
    layer, above = 0.0, found.layers - none.layers  # the head's, which is done when the layers run backward
    for one, behind in zip(reversed(elsewhere), reversed(before[:-1])):
        layer = max(layer, none.layers + above + one.saved + behind)
        above += none.layer_left + one.saved  # what was not kept is not freed either
    leaving = before[-1]
    working = {
        kind: max(found.working[kind] + (leaving if found.working[kind] > found.layers else 0.0), layer)
        for kind in (Kind.BACKWARD, Kind.INPUT)
    }
    ends = found.kept - none.kept - found.logits  # the embedding's, which are there when the layers run
    working[forward] = max(found.working[forward] + leaving - gone, at_layers + (ends if first else 0.0))
    return replace(found, kept=found.kept - gone, working=found.working | working)


@dataclass(frozen=True)
class _Run:
    """Measured bytes of units that were run, embedding and head where ``first`` and ``last``; see ``ChunkBytes``."""

    units: tuple[_Unit, ...]
    stream: float
    output: float
    kept: float
    logits: float
    held: float
    """By what a split backward pass defers."""
    widest_product: float
    first: bool
    last: bool
    splits: bool


@lru_cache(maxsize=4096)
def _run(case: Case, start: int, stop: int, first: bool, last: bool, splits: bool) -> _Run:
    """Run the passes of layers [start, stop)."""
    s, meter = Sizes(case), Meter()
    units, programs = _programs(s, start, stop, first, last)
    tape, ends = Tape(meter, defers=splits), [0]
    x = source = Value(Block(meter, 0.0 if first else s.stream))
    begin = meter.now
    for unit, program in zip(units, programs):
        before = meter.now
        meter.mark()
        x = program(tape, x)
        ends.append(len(tape))
        unit.forward, unit.kept = meter.peak - begin, meter.now - before
    gradient = Block(meter, x.size)
    gradient.readers = 1  # the runner holds it
    at_rest = meter.now
    kept = at_rest - begin - 2 * x.size
    tape.seed(x, gradient)
    for unit, end in zip(reversed(units), reversed(ends[:-1])):
        before = meter.now
        meter.mark()
        tape.run(down_to=end)
        unit.backward, unit.left = meter.peak - at_rest, meter.now - before
    held = {id(block): block.size for block in tape.deferred}
    del source
    return _Run(
        tuple(units), stream=s.stream, output=0.0 if last else x.size, kept=kept,
        logits=(1 + case.model.mtp_layers) * s.logits if last and not case.head_chunk else 0.0, held=sum(held.values()),
        widest_product=s.widest_product, first=first,
        last=last, splits=splits,
    )


def _chunk_bytes(run: _Run, more: int) -> ChunkBytes:
    """Return the bytes of a chunk with ``more`` layers, like the second, than were run."""
    second = run.first + 1
    units = [replace(u, more=u.more + more) if i == second else u for i, u in enumerate(run.units)]
    return ChunkBytes(
        stream=run.stream, output=run.output, kept=run.kept + sum(unit.more * unit.kept for unit in units),
        logits=run.logits,
        deferred=run.held + sum(u.more * (u.kept + u.left) for u in units) if run.splits else 0.0,
        layer_left=units[len(units) // 2].left,
        layers=_most_backward(units[run.first : len(units) - run.last], units[len(units) - run.last :]),
        working={
            Kind.FORWARD: max(u.forward + sum(v.more * v.kept for v in units[:i]) for i, u in enumerate(units)),
            Kind.BACKWARD: _most_backward(units), Kind.INPUT: _most_backward(units), Kind.WEIGHT: run.widest_product,
        },
    )


def _most_backward(units: list[_Unit], above: Sequence[_Unit] = ()) -> float:
    """The peak of the backward pass: units that were not run have been freed where the pass is below them. ``above``:
    further ones, whose own peaks are left out."""
    all_units = [*units, *above]
    peaks = (u.backward + sum(v.more * v.left for v in all_units[i + 1 :]) for i, u in enumerate(units))
    return max(peaks, default=0.0)  # other programs have chunks with an embedding or a head alone


Step = Callable[[Tape, Value], Value]


def _programs(s: Sizes, start: int, stop: int, first: bool, last: bool) -> tuple[list[_Unit], list[Step]]:
    """The units of a chunk and their programs; of layers alike in a row three, the second of which stands for more."""
    units: list[_Unit] = []
    programs: list[Step] = []
    if first:
        units.append(_Unit(0))
        programs.append(lambda tape, x: embedding(tape, s))
    for spec, count in model_spec(s.case.model).kinds(start, stop):
        run = min(count, ALIKE)
        units += [_Unit(count - run if i == 1 else 0) for i in range(run)]
        programs += [lambda tape, x, spec=spec: layer(tape, s, spec, x)] * run  # type: ignore[misc]
    if last:
        units.append(_Unit(0))
        programs.append(lambda tape, x: _losses(tape, s, x))
    return units, programs


def _losses(t: Tape, s: Sizes, x: Value) -> Value:
    """The head, and the modules that predict further tokens."""
    hidden, loss = head(t, s, x)
    for part in model_spec(s.case.model).head.predictions:
        hidden, further = prediction(t, s, part, hidden)
        loss = t.note(t.block(loss.size), [loss, further], lambda grad, saved: [grad, grad])
    return loss
