"""Settings of mixers other than plain attention: latent attention, recurrences, mixers that plugins register."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_port.core.config.conflicts import Conflict, Rule, Table
from megatron_port.core.config.model import ATTENTION, MixerKind, RecurrentConfig
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.registry import MIXERS, unknown_choices
from megatron_port.ext.mixers.recurrent_spec import RecurrentKind, sizes_of

_OWN = ("q_lora_rank", "qk_rope_head_dim", "v_head_dim", "latent_norm_epsilon")
ATTENTION_SETTINGS = (
    "attention_chunk", "attention_dropout", "attention_gate", "attention_pattern", "attention_scale", "attention_sinks",
    "attention_softcap", "kv_lora_rank", "latent_norm_epsilon", "num_query_groups", "output_rank", "q_lora_rank",
    "qk_norm", "qk_rope_head_dim", "qkv_bias", "qkv_rank", "rope_pattern", "sliding_window", "v_head_dim",
)
"""Settings of a model that only attention reads, unless a mixer says that it does too."""


def _without_latents(config: RunConfig) -> list[str]:
    asked = [f"{name} = {value}" for name in _OWN if (value := getattr(config.model, name))]
    return [f"model.{' and '.join(asked)} needs kv_lora_rank, e.g. 512"] if asked else []


def _key_sizes(config: RunConfig) -> list[str]:
    m = config.model
    if not m.head_dim:
        return ["model.kv_lora_rank needs head_dim, the elements of a query and of a key, e.g. 192"]
    if m.qk_rope_head_dim % 2 or not 0 < m.qk_rope_head_dim <= m.head_dim or m.head_dim % 2:
        return [f"model.qk_rope_head_dim {m.qk_rope_head_dim} must be even, from 2 to head_dim {m.head_dim} (even, "
                "too)"]
    if m.v_head_dim > m.head_dim:
        return [f"model.v_head_dim {m.v_head_dim} is above head_dim {m.head_dim}; use at most {m.head_dim}"]
    return []


LATENTS = (
    Table(on=lambda c: not c.model.kv_lora_rank, sized=True, more=(_without_latents,)),
    Table(
        asked="model.kv_lora_rank {c.model.kv_lora_rank}", on=lambda c: c.model.kv_lora_rank, sized=True,
        link="does not go with", rows=(
            Conflict("model.position_embedding", use='use "rope"', allowed=("rope",)),
            Conflict("model.num_query_groups", use="use 0",
                     when=lambda c: c.model.num_query_groups not in (0, c.model.num_attention_heads)),
            Conflict("model.rotary_percent", use="use 1.0", allowed=(1.0,)),
            Conflict("model.qk_norm", use="use false"),
            Conflict("model.attention_gate", use="use false"),
            Conflict("model.qkv_bias", use="use false"),
            Conflict("model.add_bias", use="use false"),
            Conflict("model.normalization", use='use "rmsnorm"', allowed=("rmsnorm",)),
            Rule(lambda c: c.precision.fp8 != "none",
                 'precision.fp8 "{c.precision.fp8}" is not built for latent attention; use fp8 = "none"'),
        ), more=(_key_sizes,),
    ),
)


def _unable(config: RunConfig) -> list[str]:
    """Name what the model's mixers cannot do."""
    unknown = unknown_choices(MIXERS.field, config.model.mixer_pattern)
    if unknown:
        wrong = " and ".join(map(repr, dict.fromkeys(unknown)))
        return [f"model.mixer_pattern names {wrong}, which no mixer is; use {', '.join(MIXERS.names)}"]
    if config.model.mixer_pattern and config.model.mixer != ATTENTION:
        return [f"model.mixer_pattern says the mixers of all layers; leave out model.mixer {config.model.mixer!r}"]
    named = [name for name in config.model.mixers if name in MIXERS.names]  # config.checks names an unknown one
    out = [] if ATTENTION in named else list(_unread(config, named))
    for name in named:
        if name != ATTENTION:
            out += _refused(config, name, MIXERS.get(name, MixerKind))
    return out


def _unread(config: RunConfig, names: Sequence[str]) -> Iterator[str]:
    """Name settings of attention that none of the mixers reads."""
    read, plain = {s for name in names for s in MIXERS.get(name, MixerKind).settings}, ModelConfig()
    shown = " and ".join(f"{name!r}" for name in names)
    for setting in ATTENTION_SETTINGS:
        if setting not in read and getattr(config.model, setting) != getattr(plain, setting):
            yield f"model.{setting} is of attention, and model.mixer {shown} does not read it; leave it out"


def _refused(config: RunConfig, name: str, kind: MixerKind) -> Iterator[str]:
    layout = config.layout
    if layout.context_parallel_size > 1 and not kind.context:
        yield (
            f"model.mixer {name!r} does not divide positions over context-parallel ranks; set "
            "layout.context_parallel_size = 1"
        )
    if config.data.attention_documents == "within" and not kind.documents:
        yield (
            f"model.mixer {name!r} does not stop at the start of a document; set data.attention_documents = \"across\""
        )


def _unbuilt(config: RunConfig) -> list[str]:
    """Name features that know the matrices of attention alone."""
    model, others = config.model, [name for name in config.model.mixers if name != ATTENTION]
    if not others:
        return []
    asked = {
        f'precision.fp8 "{config.precision.fp8}"': ('fp8 = "none"', config.precision.fp8 != "none"),
        "a [sparsity] section": ('sparsity.method = "none"', config.sparsity.enabled),
        "a [quantisation] section": ('quantisation.weights = "none"', config.quantisation.enabled),
        f"model.mup_base_size {model.mup_base_size}": ("0", model.mup_base_size > 0),
        f"model.shared_layers {model.shared_layers}": ("1", model.shared_layers > 1 and len(model.mixers) > 1),
    }
    out = [f"{what} is not built for model.mixer {others[0]!r}; use {use}" for what, (use, on) in asked.items() if on]
    tuning = config.fine_tuning
    if tuning.enabled and not tuning.targets:
        out.append(f"fine_tuning.method {tuning.method!r}: projections of model.mixer {others[0]!r} have no adapters "
                   'and stay frozen; name the matrices that are trained, e.g. targets = ["output", "up", "down"]')
    return out


def _unused(config: RunConfig) -> list[str]:
    plain = config.model.mixers == (ATTENTION,) and config.model.recurrent != RecurrentConfig()
    return ["[model.recurrent] is of mixers with a state, and all layers have attention; leave it out, or say "
            "model.mixer or model.mixer_pattern"] if plain else []


def _recurrent(config: RunConfig) -> list[str]:
    """Name settings of mixers with a state that none reads, and sizes that do not divide."""
    model, out = config.model, []
    named = [name for name in config.model.mixers if name != ATTENTION]
    kinds = {name: kind for name in named if isinstance(kind := MIXERS.get(name, MixerKind), RecurrentKind)}
    if not kinds:
        return []
    plain, read = RecurrentConfig(), {setting for kind in kinds.values() for setting in kind.reads}
    shown = " and ".join(f"{name!r}" for name in kinds)
    for setting, value in vars(model.recurrent).items():
        if setting not in read and value != getattr(plain, setting):
            out.append(f"model.recurrent.{setting} {value} is of other mixers, and model.mixer {shown} does not read "
                       "it; leave it out")
    for kind in kinds.values():
        wrong = list(kind.faults(model))
        out += wrong or _shares(config, kind)
    return list(dict.fromkeys(out))


def _shares(config: RunConfig, kind: RecurrentKind) -> list[str]:
    """Name ranks that cannot share out a mixer's units, or hold too few positions for its convolution."""
    model, layout, out = config.model, config.layout, []
    r, units, tp = sizes_of(model), kind.spec(model, 0).units, layout.tensor_parallel_size
    if units % tp:
        setting = "key_heads" if "key_heads" in kind.reads and units == r.key_heads else "heads"
        out.append(f"layout.tensor_parallel_size {tp} does not divide model.recurrent.{setting} {units}, which ranks "
                   f"share out; use {' or '.join(str(n) for n in _divisors(units))}")
    if r.segment < r.kernel:
        out.append(f"model.recurrent.segment {r.segment} is below kernel {r.kernel}; a segment has at least what the "
                   "convolution reads")
    chunks = layout.context_parallel_size * (1 if layout.cp_order == "contiguous" else 2)
    if layout.context_parallel_size > 1 and model.seq_length // chunks < r.kernel - 1:
        out.append(f"model.seq_length {model.seq_length} gives context-parallel ranks {model.seq_length // chunks} "
                   f"neighbouring positions, and a convolution of model.recurrent.kernel {r.kernel} reads "
                   f"{r.kernel - 1} before each; use fewer ranks")
    return out


def _alone(config: RunConfig) -> list[str]:
    """Name what layers of a mixer alone do not go with."""
    model = config.model
    if "none" not in model.mlp_pattern or not model.parallel_residual:
        return []
    return ['model.mlp_pattern names "none" with model.parallel_residual, under which the feed-forward block adds to '
            "the residual stream together with the mixer; set parallel_residual = false"]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 1024) + 1) if number % n == 0]


MIXER = (
    Table(more=(_unable, _unused, _unbuilt, _alone)),
    Table(on=lambda c: set(c.model.mixers) <= set(MIXERS.names), sized=True, more=(_recurrent,)),
)
