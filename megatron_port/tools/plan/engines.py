"""How programs store gradients and optimizer, what they send and what they hide; this program's two engines.

Other systems are in ``plan.programs``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a program stores gradients and optimizer, what it sends and what it hides behind compute."""

    name: str
    gradient_bytes: int = 4
    """Held for every parameter until the step's end: fp32 sums (4) or the dtype's own gradients (2)."""
    accumulate_traffic: int = 10
    """Bytes moved for each parameter and micro-batch to add its gradient: write 2, read 2 + 4, write 4, or fused 8."""
    reduce_bytes: int = 4
    """Sent for each gradient when replicas are summed."""
    shard_reduces: bool = False
    """Replicas reduce-scatter (each keeps its share) instead of all-reducing, where the optimizer is split."""
    reduce_overlap: float = 0.0
    """Share of a stage's last backward behind which gradient traffic hides (0 or 1)."""
    gather_overlap: float = 0.0
    """Share of the first forward behind which the all-gather of weights hides (0 or 1)."""
    transfer_overlap: bool = False
    """Sends between stages hide behind compute (interleaved schedules with asynchronous transfers)."""
    duplex_transfers: bool = True
    """A stage sends and receives at the same time; DeepSpeed's instructions do one after the other."""
    scatter_transfers: bool = False
    """Tensor-parallel ranks each send their share of an activation between stages (arXiv 2104.04473, section 4.1)."""
    tensor_overlap: str = "none"
    """none | backward (the gradient's all-reduce beside the weight gradient) | tiled (pieces of a product)"""
    gathers_again: bool = True
    """Under sequence parallelism a product's gathered input is gathered again in backward instead of kept."""
    copies_logits: bool = True
    """The loss keeps an fp32 copy of the logits."""
    frees_outputs: bool = True
    """A chunk's output is freed once it has been sent (Korthikanti et al., appendix B), not held with its graph."""
    bucket_bytes: float = 200e6
    """Buffers that gradient reduction and weight gathering hold."""
    update_copy_bytes: int = 0
    """Held for each parameter of the rank's share only while the optimizer steps."""
    update_extra_bytes: int = 8
    """Moved for each parameter of the rank's share beside Adam's own: unscale, clip, copies between precisions."""
    fused_update: bool = False
    """With own kernels the update unscales, clips and rounds too, and sums of gradients are not cleared."""
    expert_overlap: str = "none"
    """All-to-all of tokens: none | shared (one of a layer's two beside the block that every token passes) | passes
    (beside the passes of another micro-batch: DualPipe)"""
    keeps_keys: bool = True
    """Under context parallelism gathered keys and values are kept for backward instead of gathered again."""
    overlaps_keys: bool = False
    """Their gathering runs beside attention as far as it can."""
    block_bytes: tuple[float, float] = (0.0, 0.0)
    """Attention of gathered keys runs in a block for each rank: bytes per element of the results, forward and backward,
    to merge a block's results and gradients and to copy keys and values, which have as many heads as the queries and
    are gathered beside the first block; 0: one kernel over all keys."""
    sends_once_per_node: bool = False
    """A token goes once to each node with experts of its own, and is copied there (DeepEP)."""
    unfused_ops: float = 1.0
    """Passes over memory of bias, GeLU, dropout and residual over those of fused kernels."""
    adds_gradients: bool = True
    """Autograd adds the gradient of a residual branch to the norm's in a pass of its own; a compiler fuses it."""
    bias_passes: bool = False
    """Biases of q, k and v are added, and gradients of biases and norms summed over the tokens, in passes of their own
    instead of in the products' kernels."""
    attention: str = "flash2"
    """Whose fused attention, where the cluster's table knows it: flash2 | flash3 | cudnn."""
    linear_calls: float = 1.0
    """Host operations that a linear layer costs: one of torch; Transformer Engine's checks, casts and buffers more."""
    expert_calls: float = 0.0
    """Host operations for each expert of a rank in a grouped product, beyond one for all of them."""
    graphed: bool = False
    """A step's launches are replayed from a graph: the host starts none of them."""
    casts: str = "delayed"
    """Another program's fp8, by how it scales: delayed (of earlier steps) | current (of the tensor itself, read once
    more) | mx (of blocks of 32 values)"""
    moment_bytes: int = 0
    """Bytes of a moment of the optimizer; 0: full width (Megatron-core's precision-aware optimizer: 2)."""
    workspace_bytes: float = 0.0
    """Held by matmul libraries through the framework's allocator."""
    weighs_activation: bool = False
    """The router's weights multiply the experts' activation, so that what experts return need not be kept for them."""
    live_elements: float = 0.0
    """ZeRO-3: weights that may be gathered at once beside the parameter that is used, one parameter at a time; 0: two
    whole layers."""
    reduces_parameters: bool = False
    """ZeRO-2 and 3: a parameter's gradient goes into ``bucket_bytes`` at once; no sums of whole layers wait."""
    builds_whole: bool = False
    """ZeRO-3: a rank's model is built whole on its device, and divided over the replicas then."""
    inputs_on_host: bool = False
    """Under full recompute the layers' inputs wait on the host (DeepSpeed's cpu_checkpointing)."""


ENGINES = {
    # ext/deepspeed/deepspeed_engine.py: fp32 accumulation, fp32 all-reduce, no overlap under a pipeline.
    "deepspeed": Engine(
        name="deepspeed", accumulate_traffic=12, duplex_transfers=False, tensor_overlap="backward",
        copies_logits=False, frees_outputs=False, bucket_bytes=50e6 * 4 + 500e6 * 2, update_copy_bytes=4,
        update_extra_bytes=22,  # flattened and cast (4 + 4), unscaled and clipped (4 + 4), written back (4 + 2)
    ),
    # core/engine/native.py: the weight gradient goes straight into the fp32 sum; core/optim/sharded.py: reduced and
    # gathered in place, beside the passes; core/pipeline/runner.py: sends and receives are started ahead.
    "native": Engine(
        name="native", accumulate_traffic=8, bucket_bytes=0.0, shard_reduces=True, reduce_overlap=1.0,
        gather_overlap=1.0, transfer_overlap=True, tensor_overlap="backward", copies_logits=False, frees_outputs=False,
        expert_overlap="shared", fused_update=True,
    ),
}
"""The engines of this program, by the name in the run file."""
