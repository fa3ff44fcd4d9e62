"""Which factored linears and which shared layers a model can have."""

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


def shared_layer_problems(config: RunConfig) -> list[str]:
    """Name what layers that share weights do not go with."""
    m = config.model
    if m.shared_layers == 1:
        return []
    asked, out = f"model.shared_layers {m.shared_layers}", []
    if m.shared_layers > m.num_layers:
        out.append(f"{asked} is above num_layers {m.num_layers}; use at most that")
    if m.moe.enabled:
        out.append(f"{asked} with layers of experts, which each have their own; use 1, or moe.num_experts = 0")
    if config.engine != "native":
        out.append(f'{asked} with engine "{config.engine}", which ties the embedding alone over stages; use engine = '
                   '"native"')
    if config.fine_tuning.enabled:
        out.append(f'{asked} with fine_tuning.method "{config.fine_tuning.method}": exports of adapters have one for '
                   'each layer; use "none"')
    return out


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
