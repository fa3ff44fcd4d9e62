"""Settings that engine deepspeed cannot do right."""

from __future__ import annotations

from megatron_port.core.config.conflicts import Conflict, Rule, Table

_WITHOUT_ZERO = {
    "fp32": "its gradient norm is wrong with a pipeline and clipping", "fp16": "it trains wrongly under fp16",
    "bf16": "it refuses bf16 with fp32 accumulation",
}
_WITHOUT = (
    "engine deepspeed with layout.zero_stage 0, pipeline_parallel_size {c.layout.pipeline_parallel_size}, "
    "{c.precision.dtype} and clip_grad {c.optimizer.clip_grad}: WHY; use zero_stage 1, or engine native"
)
_USE = "use 0, or engine native"

CONFLICTS = (Table(asked="engine deepspeed", on=lambda c: c.engine == "deepspeed", rows=(
    Rule(lambda c: c.optimizer.name != "adamw",
         "engine deepspeed has no update for optimizer.name {c.optimizer.name!r}: its ZeRO cuts parameters into flat "
         "ranges and knows neither their rows nor kinds of state; use 'adamw', or engine native"),
    Conflict("layout.zero_stage", "its pipelines take stages 0 and 1 only", 'use zero_stage 1, or engine = "native"',
             refused=(2, 3)),
    Rule(lambda c: c.layout.pipeline_schedule != "1f1b" or c.layout.virtual_pipeline_size > 1,
         "engine deepspeed cannot run layout.pipeline_schedule {c.layout.pipeline_schedule!r} with "
         "virtual_pipeline_size {c.layout.virtual_pipeline_size}; use '1f1b' with 1, or engine native"),
    Conflict("layout.shard_size", "it splits optimizer state over all replicas", _USE),
    Rule(lambda c: c.precision.grad_reduce_dtype != "fp32",
         "precision.grad_reduce_dtype {c.precision.grad_reduce_dtype!r} is for engine native; use 'fp32' (deepspeed "
         "sums fp32 gradients)"),
    Rule(lambda c: c.precision.dtype == "fp64",
         "engine deepspeed keeps fp32 masters, so precision.dtype fp64 is refused; use engine native"),
    *(Rule(lambda c, dtype=dtype: c.layout.zero_stage == 0 and c.precision.dtype == dtype,  # type: ignore[misc]
           _WITHOUT.replace("WHY", why)) for dtype, why in _WITHOUT_ZERO.items()),
    Rule(lambda c: c.layout.zero_stage == 0 and c.precision.dtype not in _WITHOUT_ZERO,
         _WITHOUT.replace("WHY", "it is not used here")),
    Conflict("optimizer.clip_value", "it clips by the norm alone", _USE),
    Conflict("optimizer.clip_zscore", "its largest norm is fixed when it starts", _USE),
    Conflict("optimizer.ema_decay", "it has no hook between its update and its gather of weights", _USE),
)),)
