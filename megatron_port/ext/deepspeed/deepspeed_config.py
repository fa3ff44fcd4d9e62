"""The JSON that DeepSpeed wants, generated from our configuration and locked to what is right.

Nobody writes it by hand: a second source of truth is how the batch that is
asked for and the batch that is trained come to differ. Each locked value says
what goes wrong without it (measured on DeepSpeed 0.19.8).
"""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.errors import ConfigError


def deepspeed_config(config: RunConfig, *, replicas: int, micro_batches: int) -> dict[str, Any]:
    """DeepSpeed's configuration for ``micro_batches`` micro-batches on each of ``replicas`` of the weights.

    Ranks that share the positions of a sequence are replicas of their own to it; its batch size, of which it only
    checks that it is the product, counts a sample on each of them.

    Raises ConfigError for what this engine cannot do right.
    """
    layout, precision, batch = config.layout, config.precision, config.batch
    problems = []
    if precision.dtype not in ("fp32", "bf16", "fp16"):
        problems.append(f'precision.dtype "{precision.dtype}" needs engine = "native"; DeepSpeed\'s masters are fp32')
    if layout.zero_stage != 1:
        problems.append(
            f"layout.zero_stage {layout.zero_stage} with engine = \"deepspeed\": use 1 (its stage 0 drops replicated "
            "parameters from the gradient norm under pipeline parallelism and counts tied ones twice), or "
            'engine = "native"'
        )
    if layout.virtual_pipeline_size != 1 or layout.pipeline_schedule != "1f1b":
        problems.append(
            f'pipeline_schedule "{layout.pipeline_schedule}" with virtual_pipeline_size '
            f'{layout.virtual_pipeline_size}: DeepSpeed runs "1f1b" with 1; use those or engine = "native"'
        )
    if problems:
        raise ConfigError(problems)
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "train_batch_size": batch.micro_batch_size * micro_batches * replicas,
        "steps_per_print": 10**12,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": {
            "stage": 1,
            # Ignored with a warning under a PipelineModule.
            "overlap_comm": False,
            "reduce_bucket_size": 50_000_000,
            "allgather_bucket_size": 500_000_000,
        },
        "zero_allow_untested_optimizer": True,
        # Otherwise half-precision gradients are summed over replicas in half precision.
        "communication_data_type": "fp32",
        # A mean would need a loss multiplied by dp: a backward pass in half precision rounds at other places for a dp
        # that is no power of two (measured at dp 3, bf16: gradients 5e-2 to 2e-1 from those of one process).
        "gradient_allreduce_op": "sum",
        "data_types": {"grad_accum_dtype": "fp32"},
        "pipeline": {
            # Reentrant recompute gives the embedding no gradient at pp 1 and crashes at pp 2; ours is used instead.
            "use_reentrant": False,
            "activation_checkpoint_interval": 0,
            # Both assume activations equal on all tp ranks: silently wrong with sequence parallelism.
            "pipe_partitioned": False,
            "grad_partitioned": False,
        },
    }
    if precision.dtype == "bf16":
        out["bf16"] = {"enabled": True}
    if precision.dtype == "fp16":
        out["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 0,
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": precision.loss_scale_hysteresis,
            "min_loss_scale": precision.min_loss_scale,
        }
    return out
