"""What a step must do at the least, by group of operations: floating-point operations, and bytes to and from memory.

Each input of an operation is read once and each output written once, nothing stays in caches between operations, and
what the own kernels fuse counts as fused. The larger of FLOPs over the product rate and bytes over the copy rate is the
limit of a group; no implementation of the same operations is faster, but another division into operations may be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.compare.sizes import Size
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.telemetry.flops import parameter_count

GROUPS: dict[str, str] = {
    "attention": r"attention|flash|fmha|sdpa|causal_softmax|_softmax",
    "loss": r"cross_entropy|nll_loss|log_softmax",
    "optimizer": r"adam|square_norm|foreach|_fused_adam|multi_tensor|clip_factor|lerp|addcdiv|addcmul",
    "norm": r"norm_forward|norm_backward|layer_norm|rms_norm|ln_fwd|ln_bwd",
    "activation": r"gelu|swiglu|silu",
    "rotary and split": r"rotary",
    "bias, dropout, residual": r"dropout",
    "embedding": r"embedding|index_put|index_select",
    "products": r"mm|gemm|linear|matmul|bmm|cutlass|cublas|xmma|nvjet|Cijk",
    "copies and fills": r"copy|fill|zero|cat|memcpy|memset|clone|contiguous",
    "sums and other element-wise": r"add|mul|sub|div|sum|elementwise|vectorized|reduce|exp|pow|sqrt|where|neg|log|max",
}
"""Group → names of operations or kernels that belong to it; the first that matches."""
OTHER = "other"


@dataclass(frozen=True)
class Limit:
    """Of one group in one step."""

    flops: float = 0.0
    bytes: float = 0.0

    def seconds(self, flop_rate: float, bandwidth: float) -> tuple[float, float]:
        """By operations, by bytes."""
        return self.flops / flop_rate, self.bytes / bandwidth


def group_of(name: str) -> str:
    """The group of an operation or kernel."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def limits(size: Size) -> dict[str, Limit]:
    """Group → what a step of this project's engine must do."""
    m, e = size.model, 4 if size.dtype == "fp32" else 2
    rows = size.tokens
    h, d, a, g, f = m.hidden_size, m.head_size, m.num_attention_heads, m.kv_heads, m.ffn_size
    wide = f * (2 if m.activation == "swiglu" else 1)
    passes = size.global_batch // size.micro_batch
    layer = model_spec(m).layers[0]
    matrices = layer.matmul_numel * m.num_layers
    # A product reads two matrices and writes one; forward, input gradient and weight gradient. The sum of weight
    # gradients is fp32, read and written once per micro-batch.
    edges = [(h, d * (a + 2 * g)), (d * a, h), (h, wide), (f, h)] * m.num_layers
    if not size.layers_only:
        edges.append((h, m.vocab_size))
        matrices += h * m.vocab_size
    moved = sum(3.0 * rows * (k + n) * e for k, n in edges) + passes * matrices * (2 * e + 8)
    found = {
        "products": Limit(6.0 * rows * matrices, moved),
        # forward reads q, k, v and writes out; backward reads those and two more, writes three. Only the causal half
        # must be computed.
        "attention": Limit(
            3.0 * m.num_layers * layer.mixer.flops(m.seq_length) * size.global_batch / 2,
            m.num_layers * rows * d * e * (6.0 * a + 6.0 * g),
        ),
        # x read, y written; dy, x read, dx written; each of two norms a layer.
        "norm": Limit(0.0, (2 * m.num_layers + (not size.layers_only)) * 5.0 * rows * h * e),
        "activation": Limit(0.0, m.num_layers * rows * e * (3.0 * wide + 2.0 * f)),
        # Splitting the packed projection: forward and backward read and write it.
        "rotary and split": Limit(0.0, m.num_layers * 4.0 * rows * d * (a + 2 * g) * e),
        # Twice a layer: two read, one written; backward: the bias' sum reads, the gradient joins another.
        "bias, dropout, residual": Limit(0.0, m.num_layers * 2 * 3.0 * rows * h * e),
    }
    if size.layers_only:
        return found
    n = parameter_count(m)
    found |= {
        # statistics read the logits, the gradient reads and writes them
        "loss": Limit(0.0, 3.0 * rows * m.vocab_size * e),
        "embedding": Limit(0.0, rows * h * e * 4.0),
        # norm reads gradients; the update reads them, and reads and writes master and moments; halves are written
        "optimizer": Limit(0.0, n * (4.0 + 4.0 + 24.0 + (2.0 if e == 2 else 0.0))),
        "copies and fills": Limit(0.0, 4.0 * n),  # gradients are cleared
    }
    return found
