"""Settings of kernels: which attention masks each provider supports, matmuls in 8 bits, captured steps, narrow state.

The settings that contradict each are in tables (``registry.CONFLICTS``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_port.core.config.checks import tables_of
from megatron_port.core.config.conflicts import Conflict, Rule, Table, native_only
from megatron_port.core.config.layout import either, multiples
from megatron_port.core.config.model import ATTENTION, MixerKind
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.registry import LOSSES, MIXERS, OBJECTIVES
from megatron_port.core.registry import PROVIDERS as OP_PROVIDERS

STATE_BLOCK = 128
"""Elements of a row that share a scale under adamw-8bit."""
ALIGN = 16
"""Elements that rows and columns of an 8-bit matrix must be multiples of (cuBLASLt and hipBLASLt)."""

SERVED = {
    "sdpa": frozenset({"window", "documents", "chunk", "runs"}),
    "flash_attn": frozenset({"window", "softcap", "documents", "runs"}),
    "varlen": frozenset({"window", "documents", "runs"}),
    "fa3": frozenset[str](), "fa4": frozenset[str](),  # they stand in torch's place, which gives them no window
    "ck": frozenset[str](), "aiter": frozenset[str](),
}
"""Mask features that each provider supports (fields of :class:`MaskNeeds`); own and math support all of them."""
SERVED_PARTS = {"sdpa": frozenset({"sinks", "runs", "partials"})}
"""Abilities where results over parts of the keys are merged, which also takes the sinks in."""
_WORDS = {
    "window": "a window (model.sliding_window)", "softcap": "soft-capped scores (model.attention_softcap)",
    "sinks": "attention sinks (model.attention_sinks)",
    "documents": "attention within documents (data.attention_documents)",
    "chunk": "attention within chunks (model.attention_chunk)",
    "runs": "queries at other positions than the keys (layout.context_parallel_size)",
    "partials": "partial results (layout.cp_method = \"ring\")",
}


@dataclass(frozen=True)
class MaskNeeds:
    """Features that a run's attention needs beyond the causal softmax."""

    window: bool = False
    softcap: bool = False
    sinks: bool = False
    documents: bool = False
    chunk: bool = False
    runs: bool = False
    """Queries are some positions of the sequence, and keys all or others."""
    partials: bool = False
    """Results over parts of the keys, which are merged."""

    @classmethod
    def of(cls, config: RunConfig) -> MaskNeeds:
        """Return the needs of a run's model and of its data."""
        model, layout = config.model, config.layout
        divided = layout.context_parallel_size > 1
        kinds = model.attention_pattern[: model.num_layers] or ("window",)
        return cls(
            window="window" in kinds and 0 < model.sliding_window < model.seq_length,
            softcap=model.attention_softcap > 0, sinks=model.attention_sinks,
            documents=config.data.attention_documents == "within",
            chunk="chunk" in kinds and 0 < model.attention_chunk < model.seq_length,
            runs=divided and layout.cp_method != "heads", partials=divided and layout.cp_method == "ring",
        )

    @property
    def any(self) -> bool:
        """Whether attention is more than causal."""
        return self.window or self.softcap or self.sinks or self.documents or self.chunk or self.runs or self.partials

    def problem(self, provider: str) -> str:
        """Return a sentence with the needed features that the provider lacks; empty: none."""
        served = (SERVED_PARTS if self.partials else SERVED).get(provider) or SERVED.get(provider, frozenset(_WORDS))
        missing = [words for name, words in _WORDS.items() if getattr(self, name) and name not in served]
        return f"{provider} cannot serve {' and '.join(missing)}" if missing else ""


LARGEST_FLASH_HEAD = 256
"""Head size of flash-attn, on CUDA and in its Composable Kernel build, and of torch's copy of it."""


def fused_parts_problem(head_size: int, mask: MaskNeeds) -> str:
    """Return why torch's flash attention on a GPU cannot serve the parts of a ring, or nothing; ``head_size`` as
    :func:`own_gpu_problem` takes it."""
    if problem := mask.problem("sdpa"):
        return problem
    if head_size > LARGEST_FLASH_HEAD or head_size % 8:
        return f"torch's flash attention takes heads of up to {LARGEST_FLASH_HEAD}, a multiple of 8, not {head_size}"
    return ""


def own_gpu_problem(dtype: str, head_size: int, mask: MaskNeeds) -> str:
    """Return why the own attention kernel for GPUs cannot serve tensors of a dtype (fp32, fp16, bf16) and a head size,
    or nothing. ``head_size`` 0: not known."""
    if dtype not in ("fp16", "bf16"):
        return f"own attention on a GPU takes fp16 and bf16, not {dtype}"
    if head_size > 128 or head_size % 8:
        return f"own attention on a GPU takes heads of up to 128 elements, a multiple of 8, not {head_size}"
    lacking = [words for name, words in _WORDS.items()
               if getattr(mask, name) and name in ("softcap", "sinks", "partials")]
    return f"own attention on a GPU cannot serve {' and '.join(lacking)}" if lacking else ""


CAUSAL = MaskNeeds()
"""Nothing beyond the causal softmax."""


def _provider(config: RunConfig) -> list[str]:
    """Name needs that the chosen provider cannot meet."""
    asked, needs, out = config.backend.attention, MaskNeeds.of(config), []
    if config.model.attention_dropout > 0 and needs.partials and asked == "own":
        out.append(
            f"model.attention_dropout {config.model.attention_dropout} under layout.cp_method \"ring\" needs "
            "backend.attention auto or math: own drops no probabilities of parts of the keys; or use cp_method "
            "\"gather\""
        )
    if problem := needs.problem(asked):
        out.append(f"backend.attention = \"{asked}\": {problem}; use auto, own or math")
    return out


PROVIDERS = (Table(sized=True, more=(_provider,)),)


def linear_shapes(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Linear of a layer → (inputs, outputs) on a rank; a fraction where tensor_parallel_size does not divide."""
    m, t = config.model, config.layout.tensor_parallel_size
    heads, d, ffn = m.num_attention_heads, m.head_size, m.ffn_size
    gates = 2 if m.gated else 1
    return {
        "attention.qkv": (m.hidden_size, (heads * (1 + m.attention_gate) + 2 * m.kv_heads_held(t)) * d / t),
        "attention.output": (heads * d / t, m.hidden_size),
        "mlp.up": (m.hidden_size, gates * ffn / t),
        "mlp.down": (ffn / t, m.hidden_size),
    }


def _sizes(config: RunConfig) -> list[str]:
    m, t = config.model, config.layout.tensor_parallel_size
    shapes = linear_shapes(config)
    out = []

    def off(size: float) -> bool:
        # A size that tp does not divide is the layout's problem, said there.
        return size == int(size) and int(size) % ALIGN != 0

    def say(what: str, numbers: str, fix: str) -> None:
        out.append(f'precision.fp8 "{config.precision.fp8}": {what} {numbers}, not a multiple of {ALIGN}; {fix}')

    if off(m.hidden_size):
        unit = ALIGN if m.head_dim else math.lcm(ALIGN, m.num_attention_heads)
        near = either(multiples(m.hidden_size, unit))
        say("attention.qkv and mlp.up have", f"hidden_size {m.hidden_size} inputs", f"use hidden_size {near}")
    rows, columns = shapes["attention.qkv"][1], shapes["attention.output"][0]
    # Where the head size follows from the hidden size, fixing that fixes both.
    if (off(rows) or off(columns)) and (m.head_dim or not off(m.hidden_size)):
        heads, each = m.num_attention_heads, f"heads of {m.head_size} / tensor_parallel_size {t}"
        fix = f"use head_dim {either(multiples(m.head_size, ALIGN))}"
        if off(rows):
            say("attention.qkv has", f"({heads} + 2 × {m.kv_heads_held(t)}) {each} = {rows:g} outputs on a rank", fix)
        else:
            say("attention.output has", f"{heads} {each} = {columns:g} inputs on a rank", fix)
    if off(shapes["mlp.down"][0]):
        near = either(multiples(m.ffn_size, ALIGN * t))
        numbers = f"ffn_hidden_size {m.ffn_size} / tensor_parallel_size {t} = {m.ffn_size // t} inputs on a rank"
        say("mlp.down has", numbers, f"use ffn_hidden_size {near}")
    held = m.seq_length // config.layout.context_parallel_size
    tokens = held * config.batch.micro_batch_size
    # Under rowwise the products that sum over tokens stay in bf16.
    if config.precision.fp8 == "tensorwise" and off(tokens):
        unit = ALIGN // math.gcd(ALIGN, held)
        near = either(multiples(config.batch.micro_batch_size, unit))
        say("the weights' gradients sum over", f"{held} positions × micro_batch_size "
            f"{config.batch.micro_batch_size} = {tokens} tokens", f"use micro_batch_size {near}")
    return out


FP8 = (
    Table(asked='precision.fp8 "{c.precision.fp8}"', on=lambda c: c.precision.fp8 != "none", sized=True, rows=(
        Rule(lambda c: c.precision.dtype != "bf16",
             '{asked} needs precision.dtype "bf16", not "{c.precision.dtype}"; use bf16, or fp8 = "none"'),
    ), more=(_sizes,)),
    Table(asked="layout.tp_overlap_chunks {c.layout.tp_overlap_chunks}", sized=True,
          on=lambda c: c.layout.tp_overlap_chunks > 1,
          rows=(Conflict("precision.fp8", "a chunk would have scales of its own", 'use 1, or fp8 = "none"',
                         allowed=("none",)),)),
)
PRODUCTS = (Table(asked='backend.products "lt"', on=lambda c: c.backend.products == "lt", rows=(
    Conflict("backend.device", "which has neither cublasLt nor hipBLASLt", "use a GPU", refused=("cpu",)),
    Conflict("backend.own_kernels", "whose library calls it", 'use own_kernels "auto"', refused=("off",)),
    Rule(lambda c: c.precision.dtype not in ("bf16", "fp16"),
         '{asked} needs precision.dtype "bf16" or "fp16", not "{c.precision.dtype}"; use one of them, or '
         'products = "torch"'),
)),)


def _apart(config: RunConfig) -> bool:
    """Return whether a layout captures micro-batches apart, whatever their number (``step_pieces``)."""
    layout = config.layout
    stages = layout.pipeline_parallel_size * layout.virtual_pipeline_size
    return stages == 1 and layout.zero_stage != 2 and layout.pipeline_schedule != "gpipe"


GRAPHS = (Table(
    asked='backend.graphs "step"', on=lambda c: c.backend.graphs == "step", end=' (or graphs = "off")', rows=(
        native_only("whose step the host drives"),
        Conflict("backend.device", "where nothing is launched", "use a GPU", refused=("cpu",)),
        Conflict("backend.share_devices", "whose collectives go through the host"),
        Conflict("layout.zero_stage", "whose weights are gathered and freed by the host", "use 0, 1 or 2",
                 refused=(3,)),
        Conflict("offload.optimizer", "the host updates", allowed=("none",)),
        Conflict("activations.policy", "by which tensors may be swapped", "give activations.layers, or use another",
                 allowed=("none", "selective", "full"), when=lambda c: not c.activations.layers),
        Rule(lambda c: any(":swap" in sites for sites in c.activations.layers),
             "{asked} with activations.layers with :swap, whose copies the host drives; recompute or keep these sites"),
        Conflict("optimizer.name", "only AdamW has an update that the host does not decide", allowed=("adamw",)),
        Conflict("backend.optimizer", "the host decides on its updates", "use own or auto", allowed=("auto", "own")),
        Conflict("precision.dtype", "which the own optimizer kernel does not take", refused=("fp64",)),
        Conflict("batch.rampup_start", "where each number of micro-batches would be captured anew",
                 "use one stage of a pipeline and zero_stage 0 or 1",
                 when=lambda c: c.batch.rampup_start > 0 and not _apart(c)),
        Rule(lambda c: c.data.attention_documents == "within" and c.backend.attention not in ("sdpa", "math"),
             '{asked} with data.attention_documents "within" and backend.attention "{c.backend.attention}": flash-attn '
             'takes the lengths of documents from the host; use attention = "sdpa" or "math"'),
        Conflict("layout.cp_order", "which divides each micro-batch by its documents, where a replay repeats one",
                 'use "zigzag"', refused=("balanced",), when=lambda c: (
                     c.layout.context_parallel_size > 1 and c.data.attention_documents == "within")),
        Conflict("numerics.replay_interval", "a replay looks at every micro-batch from the host", "use 0"),
    ),
),)


def why_not_captured(config: RunConfig, *, amd: bool, optimizer: str) -> str:
    """Return why the steps of a run on a GPU are not captured; empty: they are. ``optimizer``: the chosen provider."""
    graphs = config.backend.graphs
    if graphs != "auto":
        return "" if graphs == "step" else 'backend.graphs "off"'
    if amd:
        return 'no AMD GPU has replayed a step yet; backend.graphs "step" tries it'
    if optimizer != "own":
        return f"the host decides on the updates of the optimizer's provider {optimizer}"
    providers = (op for op, registry in OP_PROVIDERS.items() if getattr(config.backend, op) in registry.added)
    if next(providers, None) or any(registry.added for registry in (MIXERS, OBJECTIVES, LOSSES)):
        return 'a plugin\'s code may read numbers of the device, which ends a capture; backend.graphs "step" tries it'
    if config.training.hooks:
        return 'training.hooks may look into the passes, which a replay does not call; backend.graphs "step" tries it'
    called, asked = (replace(config, backend=replace(config.backend, graphs=each)) for each in ("off", "step"))
    others = [text for table in tables_of(called) for text in table.problems(called)]
    refused = (text for table in tables_of(asked) for text in table.problems(asked) if text not in others)
    return next(refused, "")


def _blocks(config: RunConfig) -> list[str]:
    """Name the matrices of which a tensor-parallel rank would hold parts of blocks with one scale."""
    m, tp = config.model, config.layout.tensor_parallel_size
    if config.optimizer.name != "adamw-8bit" or tp < 2:
        return []
    sizes = {
        "the MLP's second matrix": m.ffn_size, "the shared expert's second matrix": m.moe.shared_ffn_hidden_size,
    }
    for name in m.mixers:
        if name == ATTENTION:
            sizes["attention's output projection"] = m.num_attention_heads * m.value_size
        else:
            for number, part in enumerate(MIXERS.get(name, MixerKind).spec(m, 0).parts):
                which = "second output" if number else "output"
                sizes[f"the {which} projection of model.mixer {name!r}"] = part.output.inputs
    return [
        f"optimizer.name 'adamw-8bit' has a scale for each {STATE_BLOCK} elements of a row, and "
        f"layout.tensor_parallel_size {tp} leaves each rank {n // tp} of the {n} inputs of {what}; use a size that "
        f"leaves a multiple of {STATE_BLOCK}, or optimizer.name 'adamw-bf16'"
        for what, n in sizes.items() if n and n % STATE_BLOCK == 0 and n // tp % STATE_BLOCK
    ]


NARROW_STATE = (Table(on=lambda c: set(c.model.mixers) <= set(MIXERS.names), sized=True, more=(_blocks,)),)
