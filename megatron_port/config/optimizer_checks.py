"""What can be wrong with the optimizer's settings and seen without a device."""

from __future__ import annotations

from megatron_port.config.schema import RunConfig


def optimizer_problems(config: RunConfig) -> list[str]:
    """Name what does not fit together in the schedule and the loss."""
    return [*_schedule_problems(config), *_loss_problems(config)]


def _schedule_problems(config: RunConfig) -> list[str]:
    o = config.optimizer
    out = []
    if 0 < o.lr < o.min_lr:
        out.append(f"optimizer.min_lr {o.min_lr} is above lr {o.lr}; use a value from 0 to {o.lr}")
    end = o.decay_steps or config.training.steps
    name = "optimizer.decay_steps" if o.decay_steps else "training.steps"
    if o.decay not in ("constant", "inverse_sqrt") and o.warmup_steps >= end > 0:
        out.append(f"optimizer.warmup_steps {o.warmup_steps} is not below {name} {end}; use e.g. {end // 10}")
    elif o.decay == "wsd" and o.warmup_steps + o.wsd_steps > end:
        out.append(
            f"optimizer.warmup_steps {o.warmup_steps} and wsd_steps {o.wsd_steps} are more than {name} {end}; use "
            f"wsd_steps of at most {end - o.warmup_steps}"
        )
    if o.decay != "wsd" and o.wsd_steps:
        out.append(f'optimizer.wsd_steps {o.wsd_steps} is of decay = "wsd", and decay is "{o.decay}"; leave it out')
    return out


def _loss_problems(config: RunConfig) -> list[str]:
    training = config.training
    if training.z_loss and training.loss != "cross_entropy":
        return [
            f"training.z_loss {training.z_loss} is a part of the loss cross_entropy, and training.loss is "
            f"{training.loss!r}, which brings its own terms; use 0"
        ]
    return []
