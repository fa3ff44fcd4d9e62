"""Which factored linears a model can have."""

from __future__ import annotations

from megatron_port.config.schema import ModelConfig, RunConfig


def factored_shapes(m: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of each linear that may be factored, by the name of its rank."""
    heads = m.num_attention_heads
    shapes = {
        "qkv": ((heads + 2 * m.kv_heads) * m.head_size, m.hidden_size), "output": (m.hidden_size, heads * m.value_size),
        "up": ((1 + m.gated) * m.ffn_size, m.hidden_size), "down": (m.hidden_size, m.ffn_size),
    }
    if m.kv_lora_rank:
        del shapes["qkv"]
    if all(map(m.moe.has_experts, range(m.num_layers))):
        del shapes["up"], shapes["down"]
    return shapes


def low_rank_problems(config: RunConfig) -> list[str]:
    """Name the ranks that the model, or the run, cannot have."""
    m, out = config.model, []
    if not m.ranks:
        return []
    shapes = factored_shapes(m)
    for name, rank in m.ranks.items():
        asked = f"model.{name}_rank {rank}"
        if name not in shapes:
            why = "latent attention has low-rank projections already" if name == "qkv" else "no layer is dense"
            out.append(f"{asked}: {why}; use 0")
            continue
        rows, columns = shapes[name]
        most = rows * columns // (rows + columns)
        if rank > most:
            out.append(f"{asked}: factors of a matrix of {rows} x {columns} are smaller than it up to rank {most}; use "
                       "at most that, or 0")
    asked = f"model.{next(iter(m.ranks))}_rank {next(iter(m.ranks.values()))}"
    if config.precision.fp8 != "none":
        out.append(f'{asked} with precision.fp8 "{config.precision.fp8}", which is not built for factors; use "none"')
    if config.fine_tuning.enabled:
        out.append(f'{asked} with fine_tuning.method "{config.fine_tuning.method}": adapters have no matrix to stand '
                   'beside; use "none", which trains the factors')
    return out
