"""Everything that can be wrong with a configuration and seen without a device, all at once.

``check`` raises one :class:`ConfigError` with every problem; ``resolve`` fills what is derived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_port.config.choices import CHOICES
from megatron_port.config.fp8 import fp8_problems
from megatron_port.config.layout import layout_problems, topology_sizes
from megatron_port.config.loader import did_you_mean
from megatron_port.config.neighbour import Neighbour, legal_neighbour
from megatron_port.config.rope import rope_problems
from megatron_port.config.schema import RunConfig
from megatron_port.config.secrets import secret_problems
from megatron_port.errors import ConfigError
from megatron_port.registry import OPTIMIZERS, SCHEDULES, SOURCES, choices_added

__all__ = ["Neighbour", "check", "legal_neighbour", "problems", "resolve", "topology_sizes"]

_Rule = tuple[Callable[[Any], bool], str]


def _at_least(least: int) -> _Rule:
    return (lambda x: x >= least), f"at least {least}"


_ONE, _ZERO = _at_least(1), _at_least(0)
_POSITIVE: _Rule = ((lambda x: x > 0), "above 0")
_FRACTION: _Rule = ((lambda x: 0 <= x < 1), "at least 0 and below 1")
_SPIKE: _Rule = ((lambda x: x == 0 or x > 1), "0 (off) or above 1")
LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255 for a folder's, of which names made from it (NAME-tune) need some."""
_SHARE: _Rule = ((lambda x: 0 < x <= 1), "a share, above 0 and at most 1")
_PATH: _Rule = (
    (lambda x: bool(x.strip()) and "\0" not in x and len(x.encode()) < 4096), "a path of at most 4095 bytes",
)
_FILLED: _Rule = ((lambda x: bool(x.strip())), "a non-empty string")

_SIZES: dict[str, _Rule] = {
    "model.num_layers": _ONE,
    "model.hidden_size": _ONE,
    "model.num_attention_heads": _ONE,
    "model.num_query_groups": _ZERO,
    "model.head_dim": _ZERO,
    "model.ffn_hidden_size": _ZERO,
    "model.vocab_size": _ONE,
    "model.seq_length": _ONE,
    "layout.tensor_parallel_size": _ONE,
    "layout.pipeline_parallel_size": _ONE,
    "layout.virtual_pipeline_size": _ONE,
    "layout.data_parallel_size": _ZERO,
    "layout.shard_size": _ZERO,
    "layout.context_parallel_size": _ONE,
    "layout.expert_parallel_size": _ONE,
    "layout.vocab_padding_multiple": _ONE,
    "layout.reduce_bucket_size": _ONE,
    "batch.micro_batch_size": _ONE,
    "batch.global_batch_size": _ONE,
    "batch.rampup_start": _ZERO,
    "batch.rampup_increment": _ZERO,
    "batch.rampup_samples": _ZERO,
    "cluster.gpus_per_node": _ONE,
    "cluster.nodes": _ZERO,
}
"""Sizes of the split: while one of them is out of range, no layout can be judged."""

_RANGES: dict[str, _Rule] = {
    "name": (
        (lambda x: bool(x.strip()) and x.isprintable() and not set(x) & set("/\\") and x not in (".", "..")
         and len(x.encode()) <= LONGEST_NAME),
        "a folder name of at most 200 bytes, all of them printable",
    ),
    "output_dir": _PATH,
    "seed": _ZERO,
    "model.rope_theta": _POSITIVE,
    "model.rotary_percent": ((lambda x: 0 < x <= 1), "above 0 and at most 1"),
    "model.rope_factor": _at_least(1),
    "model.rope_original_length": _ZERO,
    "model.rope_low_freq_factor": _POSITIVE,
    "model.rope_high_freq_factor": _POSITIVE,
    "model.norm_epsilon": _POSITIVE,
    "model.hidden_dropout": _FRACTION,
    "model.attention_dropout": _FRACTION,
    "model.init_std": _ZERO,
    "precision.initial_loss_scale": _POSITIVE,
    "precision.min_loss_scale": _POSITIVE,
    "precision.loss_scale_window": _ONE,
    "precision.loss_scale_hysteresis": _ONE,
    "precision.max_skipped_steps": _ONE,
    "optimizer.lr": _POSITIVE,
    "optimizer.min_lr": _ZERO,
    "optimizer.beta1": _FRACTION,
    "optimizer.beta2": _FRACTION,
    "optimizer.eps": _POSITIVE,
    "optimizer.weight_decay": _ZERO,
    "optimizer.clip_grad": _ZERO,
    "optimizer.warmup_steps": _ZERO,
    "optimizer.decay_steps": _ZERO,
    "training.steps": _ONE,
    "training.eval_interval": _ZERO,
    "training.eval_batches": _ZERO,
    "training.log_interval": _ONE,
    "checkpoint.save_interval": _ZERO,
    "checkpoint.keep": _ZERO,
    "checkpoint.max_failures": _ZERO,
    "checkpoint.lease_seconds": _POSITIVE,
    "checkpoint.resume": _PATH,
    "cluster.peak_tflops": _ZERO,
    "cluster.memory_gb": _ZERO,
    "cluster.cores_per_task": _ZERO,
    "cluster.local_disk": ((lambda x: x.startswith("/")), "an absolute path"),
    "hardware.matmul_tflops": _ZERO,
    "hardware.fp32_matmul_tflops": _ZERO,
    "hardware.fp8_peak_tflops": _ZERO,
    "hardware.fp8_matmul_tflops": _ZERO,
    "hardware.compute_units": _ZERO,
    "hardware.tile_rows": _ONE,
    "hardware.tile_columns": _ONE,
    "hardware.inner_fill": _ZERO,
    "hardware.attention_forward_tflops": _ZERO,
    "hardware.attention_backward_tflops": _ZERO,
    "hardware.launch_us": _ZERO,
    "hardware.memory_bandwidth_gb": _ZERO,
    "hardware.memory_efficiency": _SHARE,
    "hardware.reserved_gb": _ZERO,
    "hardware.fragmentation": _FRACTION,
    "hardware.package_devices": _ONE,
    "hardware.package_gb": _ZERO,
    "hardware.node_gb": _ZERO,
    "hardware.node_efficiency": _SHARE,
    "hardware.node_latency_us": _ZERO,
    "hardware.nics": _ZERO,
    "hardware.nic_gb": _ZERO,
    "hardware.network_efficiency": _SHARE,
    "hardware.network_latency_us": _ZERO,
    "hardware.nodes_per_group": _ZERO,
    "hardware.group_taper": _SHARE,
    "hardware.jitter": _ZERO,
    "calibration.matmul_scale": _POSITIVE,
    "calibration.memory_scale": _POSITIVE,
    "calibration.network_scale": _POSITIVE,
    "launch.max_attempts": _ONE,
    "launch.signal_seconds": ((lambda x: 1 <= x <= 65535), "from 1 to 65535"),  # sbatch takes 16 bits
    "launch.spare_nodes": _ZERO,
    "launch.rendezvous_timeout": _POSITIVE,
    "launch.collective_timeout": _POSITIVE,
    "preflight.matmul_tflops": _ZERO,
    "preflight.share_of_median": ((lambda x: 0 <= x <= 1), "from 0 to 1"),
    "preflight.free_memory_gb": _ZERO,
    "preflight.free_disk_gb": _ZERO,
    "preflight.node_busbw_gb": _ZERO,
    "preflight.network_busbw_gb": _ZERO,
    "preflight.link_gb": _ZERO,
    "numerics.loss_spike": _SPIKE,
    "numerics.grad_norm_spike": _SPIKE,
    "numerics.window": _at_least(2),
    "numerics.max_anomalies": _ONE,
    "numerics.state_check_interval": _at_least(-1),
    "numerics.replay_interval": _ZERO,
    "telemetry.replica_check_interval": _ZERO,
    "telemetry.published_tflops": _ZERO,
    "telemetry.project": _FILLED,
    "watch.hang_seconds": _at_least(3),
    "watch.hang_steps": _ONE,
    "watch.data_seconds": _ZERO,
    "watch.start_seconds": _POSITIVE,
    "watch.connect_seconds": _POSITIVE,
    "watch.evaluate_seconds": _POSITIVE,
    "watch.save_seconds": _POSITIVE,
    "watch.straggler_percent": _ZERO,
    "watch.straggler_windows": _ONE,
    "watch.straggler_steps": _ONE,
}

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
    sizes = _out_of_range(config, _SIZES)
    layout = [] if sizes else layout_problems(config, world_size)
    found = [*_unknown_choices(config), *sizes, *_out_of_range(config, _RANGES), *layout]
    if not sizes:
        found += [*_relations(config), *fp8_problems(config)]
    found += [*_data_problems(config), *_schedule_problems(config), *_precision_problems(config)]
    found += _engine_problems(config)
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


def _leaf(config: RunConfig, name: str) -> Any:
    value: Any = config
    for key in name.split("."):
        value = getattr(value, key)
    return value


def _unknown_choices(config: RunConfig) -> list[str]:
    out = []
    for name, own in CHOICES.items():
        allowed, value = (*own, *choices_added(name)), _leaf(config, name)
        if value not in allowed:
            near = did_you_mean(value, [str(a) for a in allowed]) if isinstance(value, str) else ""
            shown = repr(value) if isinstance(value, str) else value
            out.append(f"{name} {shown} is unknown; use {', '.join(str(a) for a in allowed)}{near}")
    return out


def _out_of_range(config: RunConfig, rules: dict[str, _Rule]) -> list[str]:
    out = []
    for name, (holds, words) in rules.items():
        value = _leaf(config, name)
        if not holds(value):
            shown = repr(value) if isinstance(value, str) else value
            out.append(f"{name} is {shown}; it must be {words}")
    return out


def _relations(config: RunConfig) -> list[str]:
    """Providers and options that exclude one another."""
    m, backend = config.model, config.backend
    out = rope_problems(m)
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
    ops = ("norm", "activation", "rotary", "dropout", "softmax", "cross_entropy", "optimizer")
    asked = [op for op in ops if getattr(backend, op) == "own"]
    if asked and dtype == "fp64":
        out.append(f"backend.{asked[0]} own takes fp32, fp16 and bf16, not precision.dtype 'fp64'; use auto")
    if asked and backend.own_kernels == "off":
        out.append(f"backend.{asked[0]} is own, but backend.own_kernels is 'off'; set one of the two to auto")
    if backend.own_kernels == "on" and dtype == "fp64":
        out.append("backend.own_kernels on needs precision.dtype fp32, fp16 or bf16, not 'fp64'; use auto")
    if backend.optimizer not in ("auto", "torch") and config.optimizer.name in OPTIMIZERS.added:
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
    if training.eval_interval and not training.eval_batches:
        out.append(f"training.eval_interval is {training.eval_interval}, but eval_batches is 0; e.g. eval_batches = 10")
    return out


def _schedule_problems(config: RunConfig) -> list[str]:
    o = config.optimizer
    out = []
    if 0 < o.lr < o.min_lr:
        out.append(f"optimizer.min_lr {o.min_lr} is above lr {o.lr}; use a value from 0 to {o.lr}")
    end = o.decay_steps or config.training.steps
    if o.decay != "constant" and o.warmup_steps >= end > 0:
        name = "optimizer.decay_steps" if o.decay_steps else "training.steps"
        out.append(f"optimizer.warmup_steps {o.warmup_steps} is not below {name} {end}; use e.g. {end // 10}")
    return out


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
        if config.optimizer.name in OPTIMIZERS.added:
            out.append(
                f"engine deepspeed has no update for optimizer.name {config.optimizer.name!r}; use 'adamw', or engine "
                "native"
            )
        if zero == 2:
            out.append(
                "engine deepspeed with layout.zero_stage 2: its pipelines take stages 0 and 1 only; use zero_stage 1, "
                "or engine native"
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
