"""Other systems as the planner sees them: what they keep, gather, send and hide. For published runs, and comparisons.

Each is read off a program's code or documents of the time, not off its measured steps;
benchmarks/evidence/planner-accuracy.md lists what is not sure. This program's own two are ``plan.case.ENGINES``.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_port.core.config.schema import ModelConfig
from megatron_port.tools.plan.case import balanced_split
from megatron_port.tools.plan.engines import Engine

MEGATRON_2021 = Engine(
    name="Megatron-LM 2021",  # fp16 gradients summed after the backward, transfers scattered over tp, no ZeRO
    gradient_bytes=4, accumulate_traffic=12, reduce_bytes=4, scatter_transfers=True, bias_passes=True,
    update_extra_bytes=26,  # cast (2 + 4), unscaled (4 + 4), clipped (4 + 4), cast back and written (4)
)
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM 2022", tensor_overlap="backward")
NEMO = Engine(
    # Recipes: distributed Adam with both overlaps, tp-comm-overlap, asynchronous p2p; Transformer Engine's modules, and
    # on Hopper its attention is cuDNN's (NVTE_FUSED_ATTN is on, FA3 is not installed).
    name="NeMo", gradient_bytes=4, accumulate_traffic=8, reduce_bytes=4, shard_reduces=True, reduce_overlap=1.0,
    gather_overlap=1.0, transfer_overlap=True, tensor_overlap="tiled", attention="cudnn",
    workspace_bytes=64 * 2.0**20,  # cuBLAS through torch and through Transformer Engine, 32 MiB each
    # Transformer Engine issues 2053 (99.7 us where torch takes 37.1) and 2897 (1.2 ms forward with 64 experts there)
    linear_calls=2.7, expert_calls=0.2,
)
NEMO_LLAMA = replace(  # grad_sync_dtype=bf16 (NeMo-Framework-Launcher, examples/training/llama/h100)
    NEMO, name="NeMo, Llama", gradient_bytes=2, accumulate_traffic=4, reduce_bytes=2,
)
MEGATRON_CORE = replace(NEMO, name="Megatron-core")  # --accumulate-allreduce-grads-in-fp32 is on with --bf16
MEGATRON_CORE_DEEP_EP = replace(  # with Transformer Engine's fused loss (ModelZoo: cross-entropy-fusion-impl te)
    # Its grouped experts of 2025 weigh the activation (moe/experts.py: a weighted SwiGLU between fc1 and fc2).
    MEGATRON_CORE, name="Megatron-core with DeepEP", sends_once_per_node=True, copies_logits=False,
    weighs_activation=True,
)
MEGATRON_CORE_FSDP = replace(
    # Megatron-core's own FSDP: weights gathered layer by layer for both passes, fp32 gradients scattered after each
    # micro-batch; interleaving and its transfers do not exist. Building the model on the meta device is an option
    # (--init-model-with-meta-device) that has to be asked for.
    MEGATRON_CORE, name="Megatron-core FSDP", transfer_overlap=False, builds_whole=True,
)
MEGATRON_BRIDGE = replace(
    # Recipes of 25.09: gradients are summed and reduced in bf16 (grad_reduce_in_fp32 = False)
    MEGATRON_CORE_DEEP_EP, name="Megatron-Bridge 25.09", gradient_bytes=2, accumulate_traffic=4, reduce_bytes=2,
    casts="current",
)
FSDP2 = Engine(
    # torchtitan of 2024-12: FSDP2 over dp x cp, weights gathered in bf16, gradients reduced in fp32 after each backward
    # pass (widened and added in passes of their own: torch fuses neither into a product), compiled layers,
    # scaled_dot_product_attention with torch's flash kernel (FlashAttention-2).
    name="FSDP2", gradient_bytes=4, accumulate_traffic=10, reduce_bytes=4, shard_reduces=True, reduce_overlap=1.0,
    gather_overlap=1.0, tensor_overlap="none", attention="flash2", casts="current", adds_gradients=False,
    # torch's _context_parallel/_attention.py. Forward: results widened (6) and merged (32 of a whole block, 16 and a
    # copy of 8 of half a block), keys and values copied (8). Backward: three gradients added (10 each of a whole block,
    # 5 and a copy of 8 of half a block), two copied to be sent (16), keys and values copied (8).
    block_bytes=(6 + (32 + 24) / 2 + 8, 3 * (10 + 13) / 2 + 16 + 8),
)
FSDP2_ASYNC = replace(FSDP2, name="FSDP2 with asynchronous tensor parallelism", tensor_overlap="tiled")
LLAMA3 = replace(
    # arXiv 2407.21783, 3.3: tensor parallelism within a node and nothing said of its overlap, asynchronous transfers,
    # FSDP that keeps gathered weights for the backward pass; trained before FlashAttention-3 was out (July 2024).
    # Nothing is said of a compiler.
    FSDP2, name="Llama 3", transfer_overlap=True, casts="delayed", adds_gradients=True, block_bytes=(0.0, 0.0),
)
MEGATRON_DEEPSPEED = Engine(
    name="Megatron-DeepSpeed", gradient_bytes=2, accumulate_traffic=8, reduce_bytes=2, bucket_bytes=0.0,
    duplex_transfers=False, scatter_transfers=True,  # DeepSpeed's defaults pipe_partitioned and grad_partitioned
    bias_passes=True,
    update_extra_bytes=26,
)
DEEPSPEED_ZERO3 = Engine(
    # Stage 3 with overlap_comm: parameters are prefetched, fp16 gradients reduce-scattered in buckets of 5e8.
    name="DeepSpeed ZeRO-3", gradient_bytes=2, accumulate_traffic=8, reduce_bytes=2, shard_reduces=True,
    reduce_overlap=1.0, gather_overlap=1.0, bucket_bytes=2e9, update_extra_bytes=22, live_elements=1e9,
    bias_passes=True,
    reduces_parameters=True,  # runtime/zero/config.py: max_live_parameters 1e9, reduce_bucket_size 5e8, two of them
)
DEEPSPEED_ZERO3_HOST = replace(
    DEEPSPEED_ZERO3, name="DeepSpeed ZeRO-3 with cpu_checkpointing", inputs_on_host=True,
)
DUALPIPE = replace(
    # DeepSeek-V3 report (arXiv 2412.19437), 3.2: exchanges beside the passes of another micro-batch, no tensor
    # parallelism, a token at most once to each of four nodes; its own attention kernels, taken as cuDNN's.
    MEGATRON_CORE, name="DualPipe", sends_once_per_node=True, expert_overlap="passes", tensor_overlap="none",
)
MEGASCALE = replace(MEGATRON_CORE, name="MegaScale-MoE", expert_overlap="passes")


def megatron_split(model: ModelConfig, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk as Megatron-core divides them: evenly, or with embedding and head counted as a layer each
    (``account_for_embedding_in_pipeline_split``; they may be a chunk alone); else as even in time as can be, for
    layouts written by hand."""
    each, rest = divmod(model.num_layers, chunks)
    if not rest:
        return (each,) * chunks
    each, rest = divmod(model.num_layers + 2, chunks)
    if not rest and chunks > 1:
        return (each - 1, *(each,) * (chunks - 2), each - 1)
    return balanced_split(model, chunks)
