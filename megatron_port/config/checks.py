"""Everything that can be wrong with a configuration and seen without a device, all at once.

``check`` raises one :class:`ConfigError` with every problem; ``resolve`` fills what is derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_port.config.architecture import architecture_problems
from megatron_port.config.attention import attention_problems
from megatron_port.config.choices import CHOICES, RANGES, SIZES
from megatron_port.config.distillation import distillation_problems
from megatron_port.config.dump import leaves
from megatron_port.config.fine_tuning import fine_tuning_problems
from megatron_port.config.fp8 import fp8_problems
from megatron_port.config.graphs import graph_problems
from megatron_port.config.latent import latent_problems
from megatron_port.config.layout import layout_problems, topology_sizes
from megatron_port.config.loader import did_you_mean
from megatron_port.config.low_rank import low_rank_problems, shared_layer_problems
from megatron_port.config.memory import activation_problems
from megatron_port.config.moe import moe_problems
from megatron_port.config.multi_token import mtp_problems
from megatron_port.config.neighbour import Neighbour, legal_neighbour
from megatron_port.config.objective import objective_problems
from megatron_port.config.offload import offload_problems
from megatron_port.config.optimizer_checks import optimizer_problems
from megatron_port.config.preference import preference_problems
from megatron_port.config.quantisation import quantisation_problems
from megatron_port.config.ranges import Range
from megatron_port.config.rope import rope_problems
from megatron_port.config.schema import RunConfig
from megatron_port.config.secrets import secret_problems
from megatron_port.config.sparsity import sparsity_problems
from megatron_port.config.unsupported import VALUES, not_supported
from megatron_port.config.urls import is_remote, url_fault
from megatron_port.errors import ConfigError
from megatron_port.registry import LOOP_HOOKS, OWN_UPDATES, SCHEDULES, SOURCES, choices_added, unknown_choices

__all__ = ["Neighbour", "check", "legal_neighbour", "problems", "resolve", "topology_sizes"]

BYTE_VOCABULARY = 257
"""256 bytes and the end of a document."""
GPT2_VOCABULARY = 50257
"""Entries of GPT-2's byte-pair encoding."""


def check(config: RunConfig, *, world_size: int | None = None) -> None:
    """Raise one ConfigError with every problem; the nearest legal layout closes it where the split is at fault.

    ``world_size`` None: cluster.nodes × gpus_per_node if given, else whatever the layout multiplies to.
    """
    found = problems(config, world_size=world_size)
    if found:
        raise ConfigError(found)


def problems(config: RunConfig, *, world_size: int | None = None) -> list[str]:
    """Return what ``check`` would raise, as a list."""
    sizes = _out_of_range(config, SIZES)
    layout = [] if sizes else layout_problems(config, world_size)
    found = [*_unknown_choices(config), *sizes, *_out_of_range(config, RANGES), *layout]
    if not sizes:
        found += [*_relations(config), *fp8_problems(config), *moe_problems(config)]
    found += [*_data_problems(config), *optimizer_problems(config), *_precision_problems(config)]
    found += [*_engine_problems(config), *offload_problems(config), *graph_problems(config)]
    found += [*fine_tuning_problems(config), *preference_problems(config), *distillation_problems(config)]
    found += objective_problems(config)
    found += [] if sizes else [*sparsity_problems(config), *quantisation_problems(config)]
    found += activation_problems(
        config.activations, num_layers=config.model.num_layers,
        described=config.cluster.memory_gb > 0 and bool(config.hardware.device or config.hardware.matmul_tflops),
        engine=config.engine,
    )
    found += secret_problems(config)
    neighbour = legal_neighbour(config, world_size) if sizes or layout else None
    if neighbour:
        found[-1] += f"\nThe nearest layout that is legal: {neighbour}."
    return found


def resolve(config: RunConfig, world_size: int | None = None) -> RunConfig:
    """A copy with every derived size filled in: replicas, key/value heads, head size, MLP width, decay_steps.

    Raises:
        ConfigError: the layout does not multiply to the world.
    """
    _, _, dp = topology_sizes(config, world_size)
    m = config.model
    return replace(
        config,
        model=replace(m, num_query_groups=m.kv_heads, head_dim=m.head_size, ffn_hidden_size=m.ffn_size),
        layout=replace(config.layout, data_parallel_size=dp),
        optimizer=replace(config.optimizer, decay_steps=config.optimizer.decay_steps or config.training.steps),
    )


def _unknown_choices(config: RunConfig) -> list[str]:
    out, values = [], dict(leaves(config))
    for name, own in CHOICES.items():
        allowed, value = (*own, *choices_added(name)), values[name]
        if value not in allowed:
            choices = [str(a) for a in allowed]
            refused = not_supported(str(value), VALUES.get(name, {}))
            # A word with another first letter is more likely another word than a misspelt one: relu, gelu.
            alike = [c for c in choices if c[:1] == str(value).lower()[:1]]
            near = did_you_mean(value, alike) if isinstance(value, str) and not refused else ""
            out.append(f"{name} {_quoted(value)}{refused or ' is unknown'}; use {', '.join(choices)}{near}")
    return out + _hook_problems(config.training.hooks)


def _hook_problems(hooks: tuple[str, ...]) -> list[str]:
    known = ", ".join(LOOP_HOOKS.names) or "none: no plugin registers one"
    unknown = unknown_choices(LOOP_HOOKS.field, hooks)
    twice = [name for name in dict.fromkeys(hooks) if hooks.count(name) > 1]
    return [
        *(f"training.hooks has {name!r}, which is unknown; use {known}" for name in unknown),
        *(f"training.hooks has {name!r} twice; leave one out" for name in twice),
    ]


def _out_of_range(config: RunConfig, ranges: Mapping[str, Range]) -> list[str]:
    values = dict(leaves(config))
    return [
        f"{name} is {_quoted(values[name])}; it must be {legal.words}"
        for name, legal in ranges.items() if not legal.holds(values[name])
    ]


def _quoted(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _relations(config: RunConfig) -> list[str]:
    """Providers and options that exclude one another."""
    m, backend = config.model, config.backend
    out = [
        *rope_problems(m), *architecture_problems(m), *attention_problems(config), *latent_problems(config),
        *mtp_problems(config), *low_rank_problems(config),
        *shared_layer_problems(config),
    ]
    if m.attention_dropout > 0 and backend.attention not in ("auto", "own", "math"):
        out.append(
            f"model.attention_dropout {m.attention_dropout} needs backend.attention auto, own or math, not "
            f"{backend.attention!r}: only those keep the mask free of the layout; or set attention_dropout = 0"
        )
    dtype = config.precision.dtype
    if backend.attention in ("flash_attn", "fa3", "fa4") and dtype not in ("fp16", "bf16"):
        out.append(f"backend.attention {backend.attention} needs precision.dtype fp16 or bf16, not {dtype!r}")
    if backend.device == "cpu":
        gpu_only = (("attention", ("flash_attn", "fa3", "fa4")), ("norm", ("apex",)), ("optimizer", ("apex",)))
        for name, choices in gpu_only:
            value = getattr(backend, name)
            if value in choices:
                out.append(f"backend.{name} {value} needs a GPU, but backend.device is 'cpu'; use auto")
    ops = ("norm", "activation", "rotary", "dropout", "softmax", "cross_entropy", "experts", "optimizer")
    asked = [op for op in ops if getattr(backend, op) == "own"]
    if asked and dtype == "fp64":
        out.append(f"backend.{asked[0]} own takes fp32, fp16 and bf16, not precision.dtype 'fp64'; use auto")
    if asked and backend.own_kernels == "off":
        out.append(f"backend.{asked[0]} is own, but backend.own_kernels is 'off'; set one of the two to auto")
    if backend.own_kernels == "on" and dtype == "fp64":
        out.append("backend.own_kernels on needs precision.dtype fp32, fp16 or bf16, not 'fp64'; use auto")
    kernels = config.optimizer.name in OWN_UPDATES and backend.optimizer == "own"
    if backend.optimizer not in ("auto", "torch") and config.optimizer.name != "adamw" and not kernels:
        out.append(
            f"backend.optimizer {backend.optimizer} is an update of adamw, not of optimizer.name "
            f"{config.optimizer.name!r}, which brings its own; use auto"
        )
    if backend.optimizer == "own" and config.engine != "native":
        out.append(f"backend.optimizer own is for engine native, not {config.engine!r}; use auto")
    return out


def _data_problems(config: RunConfig) -> list[str]:
    data, training = config.data, config.training
    out = []
    files = not data.synthetic and data.source not in SOURCES.added
    if data.source in SOURCES.added and (data.synthetic or data.train or data.mask_eod_loss):
        out.append(
            f"data.source {data.source!r} brings its own samples; leave out data.train, data.synthetic and "
            "data.mask_eod_loss, or set data.source = 'corpus'"
        )
    if files and not data.train:
        out.append('data.train is empty; give prefixes of .bin/.idx pairs, or set data.synthetic = true')
    known = ("auto", "byte", "gpt2")
    if data.tokenizer not in known and not data.tokenizer.startswith(("tiktoken:", "hf:", "sentencepiece:")):
        out.append(
            f"data.tokenizer is {data.tokenizer!r}; it must be one of {', '.join(known)}, tiktoken:ENCODING, hf:FILE, "
            f"sentencepiece:FILE{did_you_mean(data.tokenizer, list(known))}"
        )
    if any(not prefix.strip() for prefix in data.train):
        out.append("data.train has an empty name; each entry is the prefix of a .bin/.idx pair")
    out += [f"data.train: {fault}" for prefix in data.train if is_remote(prefix) and (fault := url_fault(prefix))]
    for name, url in (("mirror", config.checkpoint.mirror), ("resume", config.checkpoint.resume)):
        if (is_remote(url) or (name == "mirror" and url)) and (fault := url_fault(url, writable=True)):
            out.append(f"checkpoint.{name}: {fault}")
    here_only = {"output_dir": config.output_dir, "checkpoint.initial_weights": config.checkpoint.initial_weights,
                 "distillation.teacher": config.distillation.teacher, "distillation.logits": config.distillation.logits,
                 "data.index_cache": data.index_cache, "data.remote_cache": data.remote_cache}
    out += [f"{name} {place!r}: a store is not supported there; give a folder of this machine or of a file system that "
            "all nodes share (checkpoint.mirror copies checkpoints into a store)"
            for name, place in here_only.items() if is_remote(place)]
    if data.weights and len(data.weights) != len(data.train):
        out.append(f"data.weights has {len(data.weights)} entries for {len(data.train)} corpora in data.train")
    if any(w <= 0 for w in data.weights):
        out.append(f"data.weights {list(data.weights)}: each must be above 0")
    split = data.split
    if len(split) != 3 or any(not 0 <= f <= 1 for f in split) or abs(sum(split) - 1) > 1e-6:
        out.append(
            f"data.split {list(split)} sums to {round(sum(split), 9)}; it must be three fractions (training, "
            "validation, test) that sum to 1, e.g. [0.98, 0.01, 0.01]"
        )
    elif files and split[0] == 0:
        out.append(f"data.split {list(split)} leaves nothing for training")
    elif files and training.eval_batches and split[1] == 0:
        out.append(
            f"training.eval_batches is {training.eval_batches}, but data.split {list(split)} leaves nothing for "
            "validation; use e.g. [0.98, 0.01, 0.01]"
        )
    least = {"byte": BYTE_VOCABULARY, "gpt2": GPT2_VOCABULARY}.get(data.tokenizer, 0)
    if files and 1 <= config.model.vocab_size < least:
        out.append(
            f"model.vocab_size {config.model.vocab_size} is smaller than the {data.tokenizer} tokenizer's {least}; "
            f"use {least}"
        )
    if config.numerics.on_anomaly == "rewind" and data.order == "megatron":
        out.append(
            "numerics.on_anomaly rewind leaves samples out, and data.order megatron has exactly as many as the run's "
            "steps; use skip or stop, or data.order stateless"
        )
    if files and data.order == "megatron" and config.seed >= 2**32:
        out.append(
            f"seed is {config.seed}; data.order megatron shuffles as Megatron-LM does, with numpy's RandomState, which "
            f"takes seeds below 2^32 = {2**32}; use a smaller one, or data.order stateless"
        )
    if data.position_reset and data.attention_documents == "across":
        out.append(
            "data.position_reset counts positions from each document's start, and data.attention_documents 'across' "
            "knows no documents; set attention_documents = 'within', or leave position_reset out"
        )
    if data.position_reset and config.model.position_embedding == "rope":
        out.append(
            "data.position_reset with model.position_embedding 'rope' changes nothing but rounding: attention within a "
            "document sees differences of positions only; leave it out"
        )
    out += _packing_problems(config)
    if training.eval_interval and not training.eval_batches:
        out.append(f"training.eval_interval is {training.eval_interval}, but eval_batches is 0; e.g. eval_batches = 10")
    return out


def _packing_problems(config: RunConfig) -> list[str]:
    data = config.data
    if data.packing == "none":
        return []
    found = {
        "data.attention_documents 'across': a document would see those packed beside it; use attention_documents = "
        "'within'": data.attention_documents == "across",
        "data.order 'megatron', which cuts documents where a sample ends; use order 'stateless'":
            data.order == "megatron",
        "data.synthetic, whose samples are whole; leave one of the two out": data.synthetic,
        f"data.source {data.source!r}, which brings its own samples; leave packing out":
            data.source in SOURCES.added,
    }
    return [f"data.packing {data.packing!r} with {problem}" for problem, there in found.items() if there]


def _precision_problems(config: RunConfig) -> list[str]:
    p = config.precision
    if 0 < p.initial_loss_scale < p.min_loss_scale:
        return [f"precision.initial_loss_scale {p.initial_loss_scale} is below min_loss_scale {p.min_loss_scale}"]
    return []


def _engine_problems(config: RunConfig) -> list[str]:
    """Return what the chosen engine cannot do right."""
    layout, dtype, zero = config.layout, config.precision.dtype, config.layout.zero_stage
    out = []
    v, schedule = layout.virtual_pipeline_size, layout.pipeline_schedule
    if schedule == "zb-v" and v != 2:
        out.append(
            f"layout.pipeline_schedule 'zb-v' folds two chunks onto each stage, and virtual_pipeline_size is {v}; use 2"
        )
    elif schedule in ("gpipe", "zb-h1", *SCHEDULES.added) and v > 1:
        out.append(
            f"layout.pipeline_schedule {schedule!r} has one chunk a stage, and virtual_pipeline_size is {v}; use 1, or "
            f"the schedule '1f1b' (interleaved)" + (" or 'zb-v'" if v == 2 else "")
        )
    if zero == 2 and schedule.startswith("zb-"):
        out.append(
            f"layout.zero_stage 2 with pipeline_schedule {schedule!r}: its backward passes are split in two, and each "
            "part would have to be reduced by itself, twice the traffic; use zero_stage 1, or the schedule '1f1b'"
        )
    if config.engine == "deepspeed":
        if config.optimizer.name != "adamw":
            out.append(
                f"engine deepspeed has no update for optimizer.name {config.optimizer.name!r}: its ZeRO cuts "
                "parameters into flat ranges and knows neither their rows nor kinds of state; use 'adamw', or engine "
                "native"
            )
        if zero >= 2:
            out.append(
                f"engine deepspeed with layout.zero_stage {zero}: its pipelines take stages 0 and 1 only; use "
                'zero_stage 1, or engine = "native"'
            )
        if schedule != "1f1b" or v > 1:
            out.append(
                f"engine deepspeed cannot run layout.pipeline_schedule {schedule!r} with virtual_pipeline_size {v}; "
                "use '1f1b' with 1, or engine native"
            )
        if layout.shard_size:
            out.append(
                f"engine deepspeed with layout.shard_size {layout.shard_size}: it splits optimizer state over all "
                "replicas; use 0, or engine native"
            )
        if config.precision.grad_reduce_dtype != "fp32":
            out.append(
                f"precision.grad_reduce_dtype {config.precision.grad_reduce_dtype!r} is for engine native; use 'fp32' "
                "(deepspeed sums fp32 gradients)"
            )
        if dtype == "fp64":
            out.append("engine deepspeed keeps fp32 masters, so precision.dtype fp64 is refused; use engine native")
        if zero == 0:
            reason = {
                "fp32": "its gradient norm is wrong with a pipeline and clipping",
                "fp16": "it trains wrongly under fp16",
                "bf16": "it refuses bf16 with fp32 accumulation",
            }.get(dtype, "it is not used here")
            out.append(
                f"engine deepspeed with layout.zero_stage 0, pipeline_parallel_size {layout.pipeline_parallel_size}, "
                f"{dtype} and clip_grad {config.optimizer.clip_grad}: {reason}; use zero_stage 1, or engine native"
            )
    return out
