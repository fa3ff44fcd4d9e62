"""Specs of the model's parts: each states its parameters and its cost once. Plain Python, without torch.

Modules are built from these specs, and parameter counts, FLOPs, memory, the pipeline's split, the planner and the
Hugging Face mapping read them. A part that is stated here is therefore counted, planned, saved and exported; a
parameter that a module has beside its spec fails ``tests/unit/test_model_spec.py``.

Names of a layer's parameters are relative to the layer, so that equal layers are one object;
``ModelSpec.parameters`` puts ``layers.17.`` in front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from typing import Any, ClassVar, Literal

from megatron_port.core.layers.spec import Gradient, Groups, LinearSpec, NormSpec, ParameterSpec, Split
from megatron_port.core.model.ops import INPUT, Op, Site

# Specs of what mixes the positions of a layer. Plain Python, without torch.
#
# ``model.mixer`` names it (``registry.MIXERS``): the package's own is attention (``model.spec``), and
# plugins add others. Parameter counts, FLOPs, memory, the planner's seconds and the layer's forward pass ask the
# spec, so that a mixer is trained, counted, planned and saved from its own statement.

@dataclass(frozen=True, kw_only=True)
class MixerSpec(ABC):
    """Projections from the layer's input, the core between them, and the output projection.

    The module that :meth:`build` returns is the layer's ``attention``: it has ``output``, and what :meth:`ops` run.
    Names of parameters begin with ``attention.``.
    """

    module: ClassVar[str]
    """Where the class of its module is, ``"module:attribute"``, imported when a layer is built."""
    output: LinearSpec
    """Reads what the core mixed; row-parallel."""
    window: int = 0
    """Positions that one sees at most; 0: all before it."""
    recomputes: ClassVar[bool] = False
    """The core is always computed again in the backward pass."""

    @property
    @abstractmethod
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules; names relative to the layer."""

    @property
    @abstractmethod
    def projections(self) -> tuple[LinearSpec, ...]:
        """Products with the layer's input, or with what they made of it, in the order of the forward pass."""

    @abstractmethod
    def flops(self, seq: int, document: float = 0.0) -> float:
        """Operations of the core in one sample's forward, projections left out. ``document``: tokens of the document
        that a token is in, in the mean over tokens; 0: the sample is one."""

    @abstractmethod
    def ops(self, source: str) -> tuple[Op, ...]:
        """Return the operations from the value ``source`` to ``mixed``, which ``output`` reads."""

    def build(self, layer: str, build: Any) -> Any:
        """Return the module (torch.nn.Module). ``layer``: before the names of its parameters; ``build``: the context
        (``model.build.BuildContext``)."""
        where, _, name = self.module.partition(":")
        return getattr(import_module(where), name)(layer, self, build)

    @property
    def attention(self) -> AttentionSpec | None:
        """The softmax over scores of pairs of positions; None: the core is something else."""
        return None

    @property
    def parts(self) -> tuple[MixerSpec, ...]:
        """Mixers of the layer's input whose results are summed, that of a second one in the value ``beside``."""
        return (self,)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """In the order of the forward pass."""
        return *self.projections, *self.output.factors

    def pair_flops(self, seq: int, document: float = 0.0) -> float:
        """The operations among :meth:`flops` of which a causal core needs half: those of pairs of positions."""
        return 0.0

    @property
    def passed(self) -> tuple[float, float, float]:
        """Elements of one sample, on all tensor-parallel ranks together, that context-parallel ranks exchange of each
        run of positions, unless they exchange keys and values: in the compute dtype, and in fp32 or fp64; and what they
        keep beside those, in fp32 or fp64."""
        return 0.0, 0.0, 0.0

    @property
    def entry_rank(self) -> int:
        """Features that tensor-parallel ranks exchange at the entry in place of the residual stream's; 0: those."""
        return 0

    @property
    def mixed_features(self) -> int:
        """Elements per token that the core returns."""
        return self.output.inputs

    @property
    def up_projections(self) -> tuple[LinearSpec, ...]:
        """Projections from latents to heads."""
        return ()

    def packed_features(self, tp: int) -> int:
        """Elements per token of what the core reads on ``tp`` ranks together, copies included."""
        return sum(linear.outputs_held(tp) for linear in self.projections if linear.parallel == "column")

    def normalized_features(self, tp: int) -> int:
        """Elements per token that norms of what the core reads see on ``tp`` ranks together."""
        return 0

    @property
    def norms_over_ranks(self) -> int:
        """Norms whose mean is over the heads of all tensor-parallel ranks."""
        return 0

    @property
    def latent_norms(self) -> tuple[NormSpec, ...]:
        """Norms of latents, which every tensor-parallel rank has whole."""
        return ()


# Specs of softmax attention: grouped-query with a fused projection, and by way of latents. Plain Python.

Rotation = Literal["none", "usual", "window"]
"""Rotation of queries and keys: none, by the model's frequencies, or by those of layers with a window."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(MixerSpec):
    """Causal self-attention with a softmax over scores, however queries, keys and values are made."""

    groups: Groups
    rotation: Rotation
    chunk: int = 0
    """Positions of a chunk, of which a query sees its own alone; 0: the sequence is one."""
    softcap: float = 0.0
    """Soft-cap of the scores; 0: none."""
    sinks: ParameterSpec | None = None
    """A score per query head without a key and a value."""

    @property
    def attention(self) -> AttentionSpec:
        return self

    @property
    def _own_parameters(self) -> tuple[ParameterSpec, ...]:
        """Parameters that come before the projections'."""
        return () if self.sinks is None else (self.sinks,)

    @property
    def value_size(self) -> int:
        """Elements of a head's value."""
        return self.groups.head_size

    @property
    def mixed_features(self) -> int:
        return self.groups.heads * self.groups.head_size

    @property
    def normed_heads(self) -> NormSpec | None:
        """A norm of the heads of queries or of keys."""
        return None

    def is_masked(self, seq: int) -> bool:
        """Whether attention over ``seq`` tokens is more than causal."""
        return 0 < self.window < seq or 0 < self.chunk < seq or self.softcap > 0 or self.sinks is not None

    def packed_features(self, tp: int) -> int:
        """Elements per token of queries, keys and values on ``tp`` ranks together, copies and padding included."""
        return self.groups.rows_held(tp)

    def flops(self, seq: int, document: float = 0.0) -> float:
        """Operations of QKᵀ and of the weights times V of one sample's forward. The causal half is not taken off, nor
        is a window's. ``document``: as :meth:`scores_seen`."""
        sizes = self.groups.heads * (self.groups.head_size + self.value_size)
        return 2 * self.scores_seen(seq, document) * sizes

    def pair_flops(self, seq: int, document: float = 0.0) -> float:
        return self.flops(seq, document)

    def scores_seen(self, seq: int, document: float = 0.0) -> float:
        """Twice the scores of one head that documents and a window leave of ``seq`` tokens: w (2 d - w) seq / d.

        ``document``: tokens of the document that a token is in, in the mean over tokens; 0: the sample is one. Exact
        without a window, and with one where all documents have this length.
        """
        length = min(document or seq, self.chunk or seq, seq)
        window = min(self.window or length, length)
        seen = window * (2 * length - window)
        return seen if length == seq else seen * seq / length

    def ops(self, source: str) -> tuple[Op, ...]:
        return self._two_ops(source, "heads", "scores")

    def _two_ops(self, source: str, heads: str, scores: str) -> tuple[Op, ...]:
        """Queries, keys and values of ``source``, and what is mixed of them."""
        return (
            Op(kind=heads, run="attention.core_arguments", site="qkv", reads=(source,), writes=("heads",), part=self),
            Op(kind=scores, run="attention.attend_to", site="core", reads=("heads",), writes=("mixed",), part=self),
        )


@dataclass(frozen=True, kw_only=True)
class GroupedAttentionSpec(AttentionSpec):
    """Attention with a fused projection of queries, keys and values, and optional norms of queries and of keys."""

    module: ClassVar[str] = "megatron_port.core.model.attention:SelfAttention"
    qkv: LinearSpec
    query_norm: NormSpec | None
    key_norm: NormSpec | None

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        return self.qkv.factors

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        norms = tuple(p for n in (self.query_norm, self.key_norm) if n is not None for p in n.parameters)
        return (*self._own_parameters, *self.qkv.parameters, *norms, *self.output.parameters)

    @property
    def entry_rank(self) -> int:
        return self.qkv.rank

    @property
    def normed_heads(self) -> NormSpec | None:
        return self.query_norm or self.key_norm

    def normalized_features(self, tp: int) -> int:
        """Elements per token that the norms of queries and keys read on ``tp`` ranks together, copies included."""
        heads = self.groups.heads if self.query_norm is not None else 0
        heads += self.groups.held(tp) if self.key_norm is not None else 0
        return heads * self.groups.head_size

    @property
    def norms_over_ranks(self) -> int:
        return sum(norm is not None and norm.split is not None for norm in (self.query_norm, self.key_norm))


__all__ = [
    "AttentionSpec", "FeedForward", "Gradient", "GroupedAttentionSpec", "Groups",
    "LayerSpec", "LinearSpec", "MLPSpec", "MixerSpec", "NormSpec", "ParameterSpec", "Rotation", "Split",
]

@dataclass(frozen=True, kw_only=True)
class FeedForward(ABC):
    """The feed-forward block of a layer. Names of its parameters begin with ``mlp.``.

    The module that :meth:`build` returns is the layer's ``mlp`` (``model.mlp.FeedForwardBlock``).
    """

    module: ClassVar[str]
    """Where the class of its module is, ``"module:attribute"``, imported when a layer is built."""

    @property
    @abstractmethod
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules; names relative to the layer."""

    @property
    @abstractmethod
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products with every token, in the order of the forward pass."""

    @property
    @abstractmethod
    def numel_per_token(self) -> int:
        """Elements of the matrices that one token passes."""

    @property
    def idle_numel(self) -> int:
        """Elements of the parameters that take no part in the computation of a token."""
        return 0

    @property
    def buffers(self) -> tuple[ParameterSpec, ...]:
        """State that no gradient changes, named as parameters are."""
        return ()

    @property
    def bias(self) -> bool:
        """Whether the last product's bias is left to what adds the block to the residual stream."""
        return False

    @property
    def dense_block(self) -> MLPSpec | None:
        """Block that every token passes and tensor parallelism splits; None: there is none."""
        return None

    @abstractmethod
    def ops(self, source: str) -> tuple[Op, ...]:
        """Return the operations from the value ``source`` to ``mlp``."""

    def tallies(self, layers: int) -> Mapping[str, Any]:
        """Return what the block counts in a step (``layers.step.TallySpec`` by name), of a model of ``layers``."""
        found: Mapping[str, Any] = self._class.tallies(self, layers)
        return found

    def build(self, name: str, index: int, build: Any) -> Any:
        """Return the module (torch.nn.Module) of layer ``index``. ``name``: before the names of its parameters;
        ``build``: the context (``model.build.BuildContext``)."""
        return self._class(name, index, self, build)

    @property
    def _class(self) -> Any:
        where, _, attribute = self.module.partition(":")
        return getattr(import_module(where), attribute)


@dataclass(frozen=True, kw_only=True)
class MLPSpec(FeedForward):
    """The feed-forward block: ``up``, the activation, ``down``."""

    module = "megatron_port.core.model.mlp:MLP"

    up: LinearSpec
    down: LinearSpec
    activation: str
    """gelu | gelu_tanh | relu2 | swiglu | geglu_tanh | swiglu_clamped"""

    @property
    def gated(self) -> bool:
        """Whether the activation is multiplied by a second projection."""
        return self.up.packed > 1

    @property
    def bias(self) -> bool:
        """Whether ``down`` has one."""
        return self.down.bias

    @property
    def dense_block(self) -> MLPSpec:
        """The block itself."""
        return self

    def keeps_gate(self, torchs: bool) -> bool:
        """Whether a forward keeps the gate's activation beside its input; ``torchs``: ops are torch's own."""
        return self.gated and (self.activation == "geglu_tanh" or (self.activation == "swiglu" and torchs))

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """In the order of the forward pass."""
        return *self.up.factors, *self.down.factors

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules."""
        return (*self.up.parameters, *self.down.parameters)

    def ops(self, source: str, module: str = "mlp") -> tuple[Op, ...]:
        """Return the operations from the value ``source`` to the value named ``module``, as its module is."""
        hidden, active = f"{module} hidden", f"{module} active"

        def op(kind: str, run: str, site: Site, reads: str, writes: str, part: LinearSpec | MLPSpec) -> Op:
            return Op(kind=kind, run=f"{module}.{run}", site=site, reads=(reads,), writes=(writes,), part=part)

        return (
            op("column", "up", "hidden", source, hidden, self.up),
            op("activation", "activate", "activation", hidden, active, self),
            op("row", "down", "output", active, module, self.down),
        )

    @property
    def numel_per_token(self) -> int:
        """Elements of the matrices that one token passes."""
        return self.up.weight_numel + self.down.weight_numel


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A transformer layer: norm, mixer, norm, residual, norm, feed-forward, norm, residual; some norms absent."""

    norm1: NormSpec | None
    mixer: MixerSpec
    """Sequence mixer: attention, latent attention or a plugin's."""
    post_norm1: NormSpec | None
    """Norm of what attention adds to the residual stream."""
    norm2: NormSpec | None
    """None under ``parallel_residual`` and with a ``norm1``: both branches read that."""
    mlp: FeedForward
    post_norm2: NormSpec | None
    """Norm of what the feed-forward block adds."""
    parallel_residual: bool
    """Attention and feed-forward both read the layer's input."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """The layer's operations, in the order of the forward pass."""
        out: list[Op] = []
        entry, stream = _normed(out, "norm1", self.norm1, INPUT)
        out += self.mixer.ops(entry)
        output, several = self.mixer.output, len(self.mixer.parts) > 1
        last = "attention alone" if several else "attention"
        out += [Op(kind="row", run="attention.output", site="residual", reads=("mixed",), writes=(last,), part=output)]
        if several:
            read = last, "beside"
            out += [Op(kind="sum", run="attention.summed", site="residual", reads=read, writes=("attention",))]
        attention, bias = _branch(out, "attention", output.bias, self.post_norm1, "residual")
        if not self.parallel_residual:
            out.append(_add("attention", attention, stream, bias, "residual"))
            (stream,) = out[-1].writes
        if not self.mlp.linears:  # the mixer alone
            return tuple(out)
        if self.norm2 is not None or not self.parallel_residual:
            before, (entry, stream) = entry, _normed(out, "norm2", self.norm2, stream)
            out[-1] = replace(out[-1], holds=(before,))
        out += self.mlp.ops(entry)
        mlp, mlp_bias = _branch(out, "mlp", self.mlp.bias, self.post_norm2, "output")
        if self.parallel_residual:  # to the stream that norm2 returns, whose backward then adds gradients in one pass
            out[-1] = replace(out[-1], holds=(entry,))
            out.append(_add("attention", attention, stream, bias, "residual"))
            (stream,) = out[-1].writes
        held = (attention,) if self.parallel_residual else (attention, entry)
        return (*out, replace(_add("mlp", mlp, stream, mlp_bias, "output"), holds=held))

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Norms as wide as the residual stream, in the order of the forward pass."""
        found = self.norm1, self.post_norm1, self.norm2, self.post_norm2
        return tuple(norm for norm in found if norm is not None)

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Products with every token, in the order of the forward pass."""
        return (*self.mixer.linears, *self.mlp.linears)

    @property
    def dense(self) -> MLPSpec:
        """The feed-forward block of a layer without experts. TypeError: it has experts."""
        if not isinstance(self.mlp, MLPSpec):
            raise TypeError("the feed-forward block of this layer has experts")
        return self.mlp

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules; names relative to the layer."""
        parts = self.norm1, self.mixer, self.post_norm1, self.norm2, self.mlp, self.post_norm2
        return tuple(p for part in parts if part is not None for p in part.parameters)

    def region_widths(self, hidden: int) -> list[tuple[int, int]]:
        """Features that enter and that leave each region which tensor-parallel ranks divide: the residual stream's
        ``hidden``, or the rank of a factored linear at that end."""
        out = [(mixer.entry_rank or hidden, mixer.output.rank or hidden) for mixer in self.mixer.parts]
        block = self.mlp.dense_block
        return out if block is None else [*out, (block.up.rank or hidden, block.down.rank or hidden)]

    @property
    def matmul_numel(self) -> int:
        """Elements of the layer's matrices that a token passes; a forward takes two operations for each."""
        return sum(linear.weight_numel for linear in self.mixer.linears) + self.mlp.numel_per_token

    def copied_numel(self, tp: int) -> int:
        """Return the number of matrix elements that ``tp`` ranks hold in addition to one copy of each."""
        return sum((p.outputs_held(tp) - p.packed * p.outputs) * p.inputs for p in self.mixer.projections)

    def forward_flops(self, seq: int, document: float = 0.0) -> float:
        """Operations of one sample's forward, element-wise work left out."""
        return 2 * seq * self.matmul_numel + self.mixer.flops(seq, document)

    def kept_features(self, tp: int) -> int:
        """Activations per token, divided over ``tp`` ranks, that a forward keeps between its products."""
        return sum(linear.kept_features(tp) for linear in self.linears)


def _normed(out: list[Op], site: Site, norm: NormSpec | None, stream: str) -> tuple[str, str]:
    """Append a norm of the residual stream; return (what the branch reads, the residual stream)."""
    if norm is None:
        return stream, stream
    writes = f"{site} normed", f"{site} stream"
    out.append(Op(kind="norm", run=site, site=site, reads=(stream,), writes=writes, part=norm))
    return writes


def _branch(out: list[Op], name: str, bias: bool, norm: NormSpec | None, site: Site) -> tuple[str, bool]:
    """Append the norm of what a branch adds, if it has one; return (what is added, whether its bias is yet to be)."""
    if norm is None:
        return name, bias
    source = name
    if bias:
        source = f"biased {name}"
        out.append(Op(kind="bias", run=f"biased_{name}", site=site, reads=(name,), writes=(source,)))
    out.append(Op(kind="branch norm", run=norm.name, site=site, reads=(source,), writes=(f"normed {name}",), part=norm))
    return f"normed {name}", False


def _add(name: str, branch: str, stream: str, bias: bool, site: Site) -> Op:
    """Return the operation that adds a branch to the residual stream."""
    kind = "biased add" if bias else "add"
    return Op(kind=kind, run=f"add_{name}", site=site, reads=(branch, stream), writes=(f"{site} sum",))


# The units of a model (embedding, layers, head) and the model of them, stated once as parts are (``model.spec``).
#
# Plain Python, without torch.

@dataclass(frozen=True, kw_only=True)
class EmbeddingSpec:
    """Token table and, where positions are learned, theirs."""

    word: ParameterSpec
    position: ParameterSpec | None

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the module: its own before those of its parts."""
        return (self.word,) if self.position is None else (self.position, self.word)

    def forward_flops(self, seq: int) -> float:
        """Return 0: rows are looked up, without any product."""
        return 0


@dataclass(frozen=True, kw_only=True)
class PredictionSpec:
    """A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437): norms of a token's embedding and of a hidden
    state, the projection of both, a layer, and the norm before the head, which it shares with the model."""

    name: str
    """Canonical, before the names of its parts."""
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    projection: LinearSpec
    layer: LayerSpec
    norm: NormSpec

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules, by canonical name."""
        before = self.embedding_norm, self.hidden_norm, self.projection
        named = [(self.name, p) for part in before for p in part.parameters]
        named += [(f"{self.name}.layer", p) for p in self.layer.parameters]
        named += [(self.name, p) for p in self.norm.parameters]
        return tuple(replace(p, name=f"{prefix}.{p.name}") for prefix, p in named)

    def forward_flops(self, seq: int) -> float:
        """Operations of one sample's forward, its logits left out."""
        return 2 * seq * self.projection.weight_numel + self.layer.forward_flops(seq)


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Final norm and projection to the vocabulary; tied to the token table or with a matrix of its own.

    In training the modules of multi-token prediction follow it, which share its matrix and the token table.
    """

    norm: NormSpec
    weight: ParameterSpec
    bias: ParameterSpec | None
    predictions: tuple[PredictionSpec, ...] = ()
    table: ParameterSpec | None = None
    """The token table that they read, where the head has another matrix."""

    @property
    def shared(self) -> tuple[ParameterSpec, ...]:
        """Parameters that the modules of multi-token prediction read too."""
        own = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return own if self.table is None else (*own, self.table)

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """In the order of the modules: the head's own before those of its parts."""
        own = (self.weight,) if self.bias is None else (self.weight, self.bias)
        table = () if self.table is None else (self.table,)
        return (*own, *self.norm.parameters, *table, *(p for part in self.predictions for p in part.parameters))

    def forward_flops(self, seq: int) -> float:
        """Operations of the logits of one sample, those of tokens further ahead included."""
        logits = (1 + len(self.predictions)) * 2 * seq * self.weight.numel
        return logits + sum(part.forward_flops(seq) for part in self.predictions)


Unit = EmbeddingSpec | LayerSpec | HeadSpec


@dataclass(frozen=True)
class ModelSpec:
    """The units of a model in order."""

    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    head: HeadSpec
    shared: int = 1
    """Consecutive layers that use one set of weights, which have the names of the first."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """Embedding, layers, head."""
        return self.embedding, *self.layers, self.head

    def parameters(self) -> Iterator[ParameterSpec]:
        """Every parameter once, in order, by canonical name; a tied table with the embedding."""
        yield from self.embedding.parameters
        for index in range(0, len(self.layers), self.shared):
            layer = self.layers[index]
            for parameter in layer.parameters:
                yield replace(parameter, name=f"layers.{index}.{parameter.name}")
        yield from (p for p in self.head.parameters if not p.tied)

    def all_kinds(self) -> list[tuple[LayerSpec, int]]:
        """All layers as runs of equal ones, and those of the modules that predict further tokens."""
        return [*self.kinds(), *((part.layer, 1) for part in self.head.predictions)]

    def kinds(self, start: int = 0, stop: int | None = None) -> list[tuple[LayerSpec, int]]:
        """The layers [start, stop) as runs of equal ones: (layer, how many)."""
        return [(layer, len(list(run))) for layer, run in groupby(self.layers[start:stop])]
