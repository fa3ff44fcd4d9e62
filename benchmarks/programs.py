"""Other systems as the planner sees them: what they keep, gather, send and hide. For published runs, and comparisons.

Each is read off a program's code or documents of the time, not off its measured steps;
benchmarks/evidence/planner-accuracy.md lists what is not sure. This program's own two are ``plan.engines.ENGINES``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.spec import LayerSpec
from megatron_port.core.pipeline.schedules import Kind
from megatron_port.ext.experts.spec import MoESpec, moe_of
from megatron_port.tools.plan.case import Case, Machine, balanced_split
from megatron_port.tools.plan.chunk import ChunkBytes, stream_of
from megatron_port.tools.plan.elements import bucket_units
from megatron_port.tools.plan.engines import Engine
from megatron_port.tools.plan.exchanges import HeadBytes, context_group, routed
from megatron_port.tools.plan.memory import StageMemory, stage_memory
from megatron_port.tools.plan.rates import Cost, Links, Rates, Span, span
from megatron_port.tools.plan.search import ends


@dataclass(frozen=True, kw_only=True)
class Program(Engine):
    """A program of others, with what this one's engines never do."""

    scatter_transfers: bool = False
    """Tensor-parallel ranks each send their share of an activation between stages (arXiv 2104.04473, section 4.1)."""
    keeps_wide_logits: bool = True
    """The loss keeps an fp32 copy of the logits."""
    frees_outputs: bool = True
    """A chunk's output is freed once it has been sent (Korthikanti et al., appendix B), not held with its graph."""
    block_bytes: tuple[float, float] = (0.0, 0.0)
    """Attention of gathered keys runs in a block for each rank: bytes per element of the results, forward and backward,
    to merge a block's results and gradients and to copy keys and values, which have as many heads as the queries and
    are gathered beside the first block; 0: one kernel over all keys."""
    sends_once_per_node: bool = False
    """A token goes once to each node with experts of its own, and is copied there (DeepEP)."""
    adds_gradients: bool = True
    """Autograd adds the gradient of a residual branch to the norm's in a pass of its own; a compiler fuses it."""
    bias_passes: bool = False
    """Biases of q, k and v are added, and gradients of biases and norms summed over the tokens, in passes of their own
    instead of in the products' kernels."""
    linear_calls: float = 1.0
    """Host operations that a linear layer costs: one of torch; Transformer Engine's checks, casts and buffers more."""
    expert_calls: float = 0.0
    """Host operations for each expert of a rank in a grouped product, beyond one for all of them."""
    scaling: str = "delayed"
    """Another program's fp8, by how it scales: delayed (of earlier steps) | current (of the tensor itself, read once
    more) | mx (of blocks of 32 values)"""
    moment_width: int = 0
    """Bytes of a moment of the optimizer; 0: full width (Megatron-core's precision-aware optimizer: 2)."""
    workspace_bytes: float = 0.0
    """Held by matmul libraries through the framework's allocator."""
    weighs_inside: bool = False
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
    modules: tuple[str, ...] = ()
    """Outputs that are dropped and made again (Megatron-core's selective recompute): layernorm, moe_act,
    mla_up_proj."""

    @property
    def copies_logits(self) -> bool:
        return self.keeps_wide_logits

    @property
    def weighs_activation(self) -> bool:
        return self.weighs_inside

    @property
    def cast_bytes(self) -> float:
        """An operand is read (2 bytes) and written with its transpose (1 + 1)."""
        return {"delayed": 4.0, "current": 6.0, "mx": 4.0 + 2 / 32}[self.scaling]

    def drops(self, output: str) -> bool:
        return output in self.modules

    def exchange_again(self, forward: float, backward: float) -> float:
        return forward

    def again(self, case: Case, layer: LayerSpec, rates: Rates) -> float:
        seconds, w = 0.0, case.width
        tokens, stream = stream_of(case)
        if "layernorm" in self.modules:
            seconds += rates.stream(len(layer.norms) * stream * 2 * w, len(layer.norms))
        moe = moe_of(layer)
        if "moe_act" in self.modules and moe is not None:
            rows, up = routed(case, moe).rows, moe.experts.up
            seconds += rates.stream(rows * moe.experts.down.inputs / case.etp * w * (up.packed + 1), 1)
        if "mla_up_proj" in self.modules:
            for linear in layer.mixer.up_projections:
                outputs, inputs = linear.product(case.tp)
                seconds += rates.product(tokens, outputs, inputs, width=1 if case.dtype == "fp8" else w)
        return seconds

    def casts(
        self, case: Case, rates: Rates, products: Sequence[tuple[float, float, float]]
    ) -> tuple[float, float]:
        """Transformer Engine's casts, read in its modules.

        With ``current`` scaling an operand is read for its largest value before it is cast; ``mx`` writes a scale for
        each 32 values. Under ``delayed`` scaling the inputs of the first product of attention and of the feed-forward
        block leave their norm in 8 bits (LayerNormLinear), which saves what that would have written and read. A weight
        is cast in the first micro-batch of a step (``is_first_microbatch``) and kept.
        """
        each = self.cast_bytes
        weights = sum(c * k for _, c, k in products) / case.micro_batches
        normed = (0, 2) if self.scaling == "delayed" else ()
        inputs = sum(r * k * (0.0 if i in normed else each) for i, (r, _, k) in enumerate(products))
        gradients = sum(r * c for r, c, _ in products)
        return (
            rates.stream(inputs + each * weights, len(products)), rates.stream(each * gradients, len(products)),
        )

    def add_passes(
        self, case: Case, layer: LayerSpec, forward: dict[str, float], backward: dict[str, float]
    ) -> None:
        if not self.adds_gradients:
            backward.pop("branches", None)
        if not (self.bias_passes and case.model.add_bias):
            return
        tokens, stream = stream_of(case)
        moe = moe_of(layer)
        split, w, dense = tokens / case.tp, case.width, layer.dense if moe is None else moe.shared
        inner = dense.down.inputs * dense.up.packed if dense is not None else 0
        # Heads put side by side; q, k and v's biases are counted as the rotation.
        forward["biases"] = split * layer.mixer.mixed_features * 2 * w
        # Read once more: gradients of both residual branches, of the norms with their inputs, of up and of q, k, v.
        heads = layer.mixer.packed_features(case.tp)
        backward["biases"] = (2 + len(layer.norms)) * stream * w + split * (inner + heads) * w

    def calls(self, linears: float, experts: float = 0.0) -> float:
        return linears * self.linear_calls + experts * self.expert_calls

    def block_attention(
        self, case: Case, own: HeadBytes, rates: Rates, links: Links, core: tuple[float, float]
    ) -> Cost | None:
        """torch's context parallelism: keys and values of all ranks are gathered beside the attention of the own ones;
        then come the others' blocks, whose gradients travel in fp32 from rank to rank beside the next block."""
        if not self.block_bytes[0]:
            return None
        group, hops = context_group(case, links), case.cp - 1
        each = links.collective(2 * case.cp * own.queries, group, kind="half")
        travel = links.hop(2 * own.queries / case.width * case.wide, group)
        merged = [b * own.queries / case.width for b in self.block_bytes]
        return Cost(
            rates.stream(hops * merged[0], 6 * hops), rates.stream(case.cp * merged[1], 8 * case.cp),
            forward_context=max(each - core[0] / case.cp, 0.0),
            backward_context=max(each - core[1] / case.cp, 0.0) + hops * max(travel - core[1] / case.cp, 0.0) + travel,
        )

    def sent_outside(self, case: Case, moe: MoESpec, group: Span, busiest: float) -> float:
        """A token's experts are on so many nodes, of which one may be its own; what arrives is copied within the
        node."""
        if group.nodes == 1 or not self.sends_once_per_node:
            return 0.0
        nodes = min(group.nodes, case.model.moe.top_groups) if case.model.moe.groups > 1 else group.nodes
        reached = nodes * (1 - (1 - 1 / nodes) ** moe.top_k)
        return busiest * reached / moe.top_k * (1 - 1 / group.nodes)

    def message(self, case: Case, links: Links, size: float) -> tuple[float, float]:
        if not (self.scatter_transfers and case.tp > 1):
            return size, 0.0
        return size / case.tp, links.collective(size, span(links.machine, case.tp, 1), kind="half")

    def buffers(self, replicas: int, elements: int, sums: float) -> float:
        held = (min(self.bucket_bytes, elements * 6.0) if replicas > 1 else 0.0) + self.workspace_bytes
        return held + (0.0 if self.reduces_parameters else sums)

    def moment_bytes(self, wide: int) -> int:
        return self.moment_width or wide

    def chunk(self, case: Case, found: ChunkBytes, layers: int) -> ChunkBytes:
        if "mla_up_proj" in self.modules:
            found = self._heads_again(case, found, layers)
        if self.frees_outputs:
            found = replace(found, output=0.0)
        if not (self.inputs_on_host and case.recompute == "full"):
            return found
        forward = max(found.working[Kind.FORWARD] - found.kept, found.layers)  # a layer's input leaves when it is done
        return replace(found, kept=found.logits - found.output, working=found.working | {Kind.FORWARD: forward})

    def _heads_again(self, case: Case, found: ChunkBytes, layers: int) -> ChunkBytes:
        """Return the bytes of a chunk that keeps latents instead of the heads that its attention read."""
        features, backward = model_spec(case.model).layers[0].mixer.mixed_features, (Kind.BACKWARD, Kind.INPUT)
        tokens = case.model.seq_length / case.cp * case.micro_batch
        heads = 3 * tokens * features / case.tp * case.width
        kept = max(found.kept - layers * heads, found.logits)
        working = {kind: size + (heads if kind in backward else 0.0) for kind, size in found.working.items()}
        return replace(found, kept=kept, working=working)

    def window(self, case: Case, stage: int, layers: int) -> int:
        if not self.live_elements:
            return layers
        return int(self.live_elements) + max(max(unit) for unit in bucket_units(case, stage))

    def late_gathers(self, case: Case) -> tuple[float, int]:
        """DeepSpeed fetches the next parameter while fewer than ``live_elements`` are there, so none beside a larger
        one, and releases what is not used again within as many: a larger layer is gathered for its recompute and again
        for its gradients (``runtime/zero/partitioned_param_coordinator.py``)."""
        live = self.live_elements
        if not live:
            return 0.0, 1
        sizes = [float(math.prod(linear.product(case.tp))) for linear in model_spec(case.model).layers[-1].linears]
        late = sum(size for before, size in zip([sizes[-1], *sizes], sizes) if before >= live)
        return late / sum(sizes), 2 if case.recompute == "full" and sum(sizes) > live else 1

    def gathers(self, layer: LayerSpec) -> int:
        return len(layer.linears) if self.live_elements else 1


MEGATRON_2021 = Program(
    name="Megatron-LM 2021",  # fp16 gradients summed after the backward, transfers scattered over tp, no ZeRO
    gradient_bytes=4, accumulate_traffic=12, reduce_bytes=4, scatter_transfers=True, bias_passes=True,
    update_extra_bytes=26,  # cast (2 + 4), unscaled (4 + 4), clipped (4 + 4), cast back and written (4)
)
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM 2022", tensor_overlap="backward")
NEMO = Program(
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
    MEGATRON_CORE, name="Megatron-core with DeepEP", sends_once_per_node=True, keeps_wide_logits=False,
    weighs_inside=True,
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
    scaling="current",
)
FSDP2 = Program(
    # torchtitan of 2024-12: FSDP2 over dp x cp, weights gathered in bf16, gradients reduced in fp32 after each backward
    # pass (widened and added in passes of their own: torch fuses neither into a product), compiled layers,
    # scaled_dot_product_attention with torch's flash kernel (FlashAttention-2).
    name="FSDP2", gradient_bytes=4, accumulate_traffic=10, reduce_bytes=4, shard_reduces=True, reduce_overlap=1.0,
    gather_overlap=1.0, tensor_overlap="none", attention="flash2", scaling="current", adds_gradients=False,
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
    FSDP2, name="Llama 3", transfer_overlap=True, scaling="delayed", adds_gradients=True, block_bytes=(0.0, 0.0),
)
MEGATRON_DEEPSPEED = Program(
    name="Megatron-DeepSpeed", gradient_bytes=2, accumulate_traffic=8, reduce_bytes=2, bucket_bytes=0.0,
    duplex_transfers=False, scatter_transfers=True,  # DeepSpeed's defaults pipe_partitioned and grad_partitioned
    bias_passes=True,
    update_extra_bytes=26,
)
DEEPSPEED_ZERO3 = Program(
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


def fullest(case: Case, machine: Machine) -> StageMemory:
    """Return the stage that needs most, which under ``Program.builds_whole`` may be while the model is built."""
    stages = [stage_memory(case, machine, stage, quick=True) for stage in ends(case)]
    program = case.engine
    if isinstance(program, Program) and program.builds_whole and case.zero_stage == 3:
        stages = [_construction(case, machine, memory) for memory in stages]
    return max(stages, key=lambda memory: memory.total)


def _construction(case: Case, machine: Machine, memory: StageMemory) -> StageMemory:
    """A rank that holds its whole model at the start, where that is more than any step needs; at the least that."""
    weights = float(memory.elements * case.width)
    if weights <= memory.allocated:
        return memory
    return StageMemory(
        stage=memory.stage, elements=memory.elements, experts=memory.experts, weights=weights, gradients=0.0,
        optimizer=0.0, activations=0.0, working=0.0, logits=0.0, buffers=0.0,
        fragmentation=weights * machine.hardware.fragmentation, reserved=machine.hardware.reserved_gb * 1e9,
        in_flight=0.0, peak_at="the model's construction",
    )
