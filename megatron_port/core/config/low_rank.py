"""Which factored linears and which shared layers a model can have."""

from __future__ import annotations

from megatron_port.core.config.conflicts import Above, Conflict, Rule, Table, native_only
from megatron_port.core.config.schema import ModelConfig, RunConfig


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


def _too_large(config: RunConfig) -> list[str]:
    """Name the ranks that the model cannot have."""
    m, out = config.model, []
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
    return out


def _asked(config: RunConfig) -> str:
    """Return the first rank that is set."""
    name, rank = next(iter(config.model.ranks.items()))
    return f"model.{name}_rank {rank}"


CONFLICTS = (
    Table(asked=_asked, on=lambda c: c.model.ranks, sized=True, rows=(
        Conflict("precision.fp8", "which is not built for factors", 'use "none"', allowed=("none",)),
        Conflict("fine_tuning.method", "adapters have no matrix to stand beside",
                 'use "none", which trains the factors', allowed=("none",)),
    ), more=(_too_large,)),
    Table(on=lambda c: c.model.shared_layers != 1, asked="model.shared_layers {c.model.shared_layers}", sized=True,
          rows=(
        Above("model.shared_layers", "model.num_layers"),
        Rule(lambda c: c.model.moe.enabled,
             "{asked} with layers of experts, which each have their own; use 1, or moe.num_experts = 0"),
        native_only("which ties the embedding alone over stages"),
        Conflict("fine_tuning.method", "exports of adapters have one for each layer", 'use "none"', allowed=("none",)),
    )),
)
