"""What can be wrong with the optimizer's settings and seen without a device."""

from __future__ import annotations

from megatron_port.config.optimizer import CLASSES, INHERITED, ParameterGroup
from megatron_port.config.schema import RunConfig
from megatron_port.registry import FALLING

STATE_BLOCK = 128
"""Elements of a row that share a scale under adamw-8bit."""


def optimizer_problems(config: RunConfig) -> list[str]:
    """Name what does not fit in the schedule, the groups, the clipping, and what the engine cannot do with them."""
    return [
        *_schedule_problems(config), *_group_problems(config.optimizer.groups), *_clipping_problems(config),
        *_loss_problems(config), *_block_problems(config),
    ]


def _schedule_problems(config: RunConfig) -> list[str]:
    o = config.optimizer
    out = []
    if 0 < o.lr < o.min_lr:
        out.append(f"optimizer.min_lr {o.min_lr} is above lr {o.lr}; use a value from 0 to {o.lr}")
    end = o.decay_steps or config.training.steps
    name = "optimizer.decay_steps" if o.decay_steps else "training.steps"
    if o.decay in FALLING and o.warmup_steps >= end > 0:
        out.append(f"optimizer.warmup_steps {o.warmup_steps} is not below {name} {end}; use e.g. {end // 10}")
    elif o.decay == "wsd" and o.warmup_steps + o.wsd_steps > end:
        out.append(
            f"optimizer.warmup_steps {o.warmup_steps} and wsd_steps {o.wsd_steps} are more than {name} {end}; use "
            f"wsd_steps of at most {end - o.warmup_steps}"
        )
    if o.decay != "wsd" and o.wsd_steps:
        out.append(f'optimizer.wsd_steps {o.wsd_steps} is of decay = "wsd", and decay is "{o.decay}"; leave it out')
    return out


def _group_problems(groups: tuple[ParameterGroup, ...]) -> list[str]:
    out = []
    for number, group in enumerate(groups, 1):
        where = f"optimizer.groups, group {number}"
        if not group.match.strip():
            out.append(f"{where} has no match; give a class ({', '.join(CLASSES)}) or a pattern of canonical names")
        if group.lr_factor < 0:
            out.append(f"{where} ({group.match}): lr_factor is {group.lr_factor}; it must be at least 0")
        if group.weight_decay < 0 and group.weight_decay != INHERITED:
            out.append(
                f"{where} ({group.match}): weight_decay is {group.weight_decay}; it must be at least 0, or -1 to leave "
                "it as it is"
            )
    names = [group.match for group in groups]
    out += [
        f"optimizer.groups has {name!r} twice, of which the first alone would count; leave one out"
        for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    return out


def _clipping_problems(config: RunConfig) -> list[str]:
    o, out = config.optimizer, []
    if o.ema_evaluate and not o.ema_decay:
        out.append("optimizer.ema_evaluate needs averaged weights; set ema_decay, e.g. 0.999")
    if config.offload.optimizer != "none":
        out += [
            f"offload.optimizer {config.offload.optimizer!r} with optimizer.{name} {getattr(o, name)}: the host "
            "updates one bucket after another, by the norm alone and without an average; use 0, or no offload"
            for name in ("clip_value", "ema_decay") if getattr(o, name)
        ]
    if config.engine != "deepspeed":
        return out
    for name, why in (
        ("clip_value", "it clips by the norm alone"), ("clip_zscore", "its largest norm is fixed when it starts"),
        ("ema_decay", "it has no hook between its update and its gather of weights"),
    ):
        if getattr(o, name):
            out.append(f"engine deepspeed with optimizer.{name} {getattr(o, name)}: {why}; use 0, or engine native")
    return out


def _loss_problems(config: RunConfig) -> list[str]:
    training = config.training
    if training.z_loss and training.loss != "cross_entropy":
        return [
            f"training.z_loss {training.z_loss} is a part of the loss cross_entropy, and training.loss is "
            f"{training.loss!r}, which brings its own terms; use 0"
        ]
    return []


def _block_problems(config: RunConfig) -> list[str]:
    """Name the matrices of which a tensor-parallel rank would hold parts of blocks with one scale."""
    m, tp = config.model, config.layout.tensor_parallel_size
    if config.optimizer.name != "adamw-8bit" or tp < 2:
        return []
    sizes = {
        "attention's output projection": m.num_attention_heads * m.value_size, "the MLP's second matrix": m.ffn_size,
        "the shared expert's second matrix": m.moe.shared_ffn_hidden_size,
    }
    return [
        f"optimizer.name 'adamw-8bit' has a scale for each {STATE_BLOCK} elements of a row, and "
        f"layout.tensor_parallel_size {tp} leaves each rank {n // tp} of the {n} inputs of {what}; use a size that "
        f"leaves a multiple of {STATE_BLOCK}, or optimizer.name 'adamw-bf16'"
        for what, n in sizes.items() if n and n % STATE_BLOCK == 0 and n // tp % STATE_BLOCK
    ]
