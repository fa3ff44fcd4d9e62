"""What does not go with sequences that context-parallel ranks divide. Pure arithmetic on sizes."""

from __future__ import annotations

from megatron_port.core.config.model import ATTENTION
from megatron_port.core.config.schema import RunConfig


def context_unit(config: RunConfig) -> int:
    """Return what a sequence must be a multiple of: equal chunks, which tensor-parallel ranks may divide again."""
    layout = config.layout
    chunks = layout.context_parallel_size * (1 if layout.cp_order == "contiguous" else 2)
    return chunks * (layout.tensor_parallel_size if _divides_rows(config) else 1)


def _divides_rows(config: RunConfig) -> bool:
    """Whether tensor-parallel ranks divide what a rank holds."""
    return config.layout.sequence_parallel or config.model.moe.enabled


def context_checks(config: RunConfig) -> list[str]:
    """Name what does not go with ``layout.context_parallel_size`` above 1."""
    layout, seq = config.layout, config.model.seq_length
    size = layout.context_parallel_size
    out, unit = [], context_unit(config)
    if seq % unit:
        near = [n for n in (seq // unit * unit, (seq // unit + 1) * unit) if n]
        parts = f"{unit} = {size} ranks × {'1 chunk' if layout.cp_order == 'contiguous' else '2 chunks'}"
        parts += f" × tensor_parallel_size {layout.tensor_parallel_size}" if _divides_rows(config) else ""
        out.append(
            f'model.seq_length {seq} does not divide by {parts} (layout.context_parallel_size, cp_order '
            f'"{layout.cp_order}"); use {" or ".join(map(str, near))}'
        )
    out += _short_blocks(config)
    out += _unequal_heads(config) if layout.cp_method == "heads" else []
    return out


def _short_blocks(config: RunConfig) -> list[str]:
    """Name blocks that have fewer positions than a convolution reads of the run before its own."""
    layout, model, within = config.layout, config.model, config.data.attention_documents == "within"
    size, read = layout.context_parallel_size, model.recurrent.kernel - 1
    if model.mixers == (ATTENTION,) or layout.cp_order != "balanced" or not within or model.seq_length % (2 * size):
        return []
    from megatron_port.ext.context.balance import block_size  # with numpy, which a check need not load

    block = block_size(model.seq_length, size)
    return [] if block >= read else [
        f'layout.cp_order "balanced" deals out blocks of {block} positions, and a convolution of model.recurrent.'
        f'kernel {read + 1} reads {read} before each run; use cp_order = "zigzag"'
    ]


def _unequal_heads(config: RunConfig) -> list[str]:
    """Name the sizes that leave context-parallel ranks without equal heads."""
    tensor, size = config.layout.tensor_parallel_size, config.layout.context_parallel_size
    queries, keys = config.model.num_attention_heads // tensor, config.model.kv_heads_held(tensor) // tensor
    if not keys or keys % size == 0 or (size % keys == 0 and queries % size == 0):
        return []
    legal = [n for n in range(2, min(queries, 1024) + 1) if keys % n == 0 or (n % keys == 0 and queries % n == 0)]
    other = f"context_parallel_size {', '.join(map(str, legal))} or " if legal else ""
    return [
        f'layout.cp_method "heads": context_parallel_size {size} must divide the {keys} key/value heads of a rank '
        f"(tensor_parallel_size {tensor}), or be a multiple of them that divides its {queries} query heads; use {other}"
        'cp_method "gather"'
    ]
