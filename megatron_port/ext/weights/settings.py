"""Settings that change which weights a layer has or trains: factors, shared layers, adapters, masks, few bits.

The matrices of a model that each applies to, and the settings that contradict it (``registry.CONFLICTS``).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from megatron_port.core.config.conflicts import Above, Conflict, Rule, Table, native_only
from megatron_port.core.config.features import NO_ADAPTERS, NO_QUANTISATION, NO_SPARSITY, SparsityConfig
from megatron_port.core.config.model import ATTENTION
from megatron_port.core.config.schema import ModelConfig, RunConfig

TARGETS = (
    "query", "key", "value", "query_down", "query_up", "kv_down", "kv_up", "output", "gate", "up", "down",
)
"""Matrices of a layer that may have an adapter."""
LINEARS = ("*.attention.*.weight", "*.mlp.up.weight", "*.mlp.up_low.weight", "*.mlp.down.weight",
           "*.mlp.down_low.weight", "*.mlp.experts.*.weight", "*.mlp.shared.*.weight")
"""Patterns of the layers' matrices, the two factors of some (``*_low``) among them, without routers."""
NOT_ELEMENTWISE = ("muon",)
"""Rules whose update of an element with a zero gradient is not zero."""
GROUP = 4
"""Elements of a 2:4 group, of which two stay."""


def factored_shapes(m: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (rows, columns) of each linear that may be factored, by the name of its rank."""
    heads = m.num_attention_heads
    rows = heads * (1 + m.attention_gate) + 2 * m.kv_heads
    shapes = {
        "qkv": (rows * m.head_size, m.hidden_size), "output": (m.hidden_size, heads * m.value_size),
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


FACTORS = (
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


def targets_of(model: ModelConfig) -> tuple[str, ...]:
    """Return the matrices that a layer of ``model`` has."""
    lacking: set[str] = set() if "glu" in model.activation else {"gate"}
    if ATTENTION not in model.mixers:
        lacking |= {"query", "key", "value"}
    if all(map(model.moe.has_experts, range(model.num_layers))) and not model.moe.shared_ffn_hidden_size:
        lacking |= {"gate", "up", "down"}
    if not model.kv_lora_rank:
        lacking |= {"query_down", "query_up", "kv_down", "kv_up"}
    else:
        lacking |= {"key", "value", *(("query",) if model.q_lora_rank else ("query_down", "query_up"))}
    return tuple(target for target in TARGETS if target not in lacking)


def _targets(config: RunConfig) -> list[str]:
    asked, present = config.fine_tuning.targets, targets_of(config.model)
    if unknown := [target for target in asked if target not in TARGETS]:
        return [f"fine_tuning.targets {unknown[0]!r} is unknown; use {', '.join(TARGETS)}"]
    missing = [target for target in asked if target not in present]
    return [f"fine_tuning.targets {missing[0]!r}: this model has {', '.join(present)}"] if missing else []


ADAPTERS = (
    Table(asked="a [fine_tuning] section", on=lambda c: not c.fine_tuning.enabled and c.fine_tuning != NO_ADAPTERS,
          rows=(Conflict("fine_tuning.method", "which trains all weights",
                         'set method = "lora" or "dora", or leave the section out', refused=("none",)),)),
    Table(on=lambda c: c.fine_tuning.enabled, asked='fine_tuning.method "{c.fine_tuning.method}"', rows=(
        Conflict("fine_tuning.dropout", "the whole product would be computed twice, with and without",
                 "use dropout = 0, or method lora",
                 when=lambda c: c.fine_tuning.method == "dora" and c.fine_tuning.dropout),
        native_only("which trains and keeps state for every weight"),
        Rule(lambda c: not c.checkpoint.initial_weights,
             "{asked} without checkpoint.initial_weights, whose weights it leaves as they are; name a Hugging Face "
             "folder, a run folder or a checkpoint"),
    ), more=(_targets,)),
)


def is_sparse(sparsity: SparsityConfig, name: str) -> bool:
    """Return whether a parameter has a mask, by its canonical name."""
    return sparsity.enabled and any(fnmatchcase(name, p) for p in LINEARS) and not name.endswith("norm.weight") and (
        not sparsity.targets or any(fnmatchcase(name, p) for p in sparsity.targets))


def inputs(model: ModelConfig) -> dict[str, int]:
    """Return the number of inputs of the layers' matrices by what they are called."""
    out = {"attention.qkv (model.hidden_size)": model.hidden_size,
           "attention.output (heads × model.head_dim)": model.num_attention_heads * model.head_size,
           **{f"the second factor of {name} (model.{name}_rank)": rank for name, rank in model.ranks.items()}}
    if not model.moe.enabled or model.moe.first_dense:
        out["mlp.down (model.ffn_hidden_size)"] = model.ffn_size
    if model.moe.enabled:
        out["mlp.experts.down (model.moe.ffn_hidden_size)"] = model.expert_size
    return out


def _groups_of_four(config: RunConfig) -> list[str]:
    return [
        f'sparsity.method "2:4": {what} has {size} inputs, which do not divide into groups of {GROUP}; use a '
        f"multiple of {GROUP}, or sparsity.targets without it"
        for what, size in inputs(config.model).items() if size % GROUP
    ] if config.sparsity.method == "2:4" else []


MASKS = (
    Table(asked="a [sparsity] section", on=lambda c: not c.sparsity.enabled and c.sparsity != NO_SPARSITY, sized=True,
          rows=(Conflict("sparsity.method", "which leaves nothing out",
                         'set method = "2:4" or "magnitude", or leave the section out', refused=("none",)),)),
    Table(asked='sparsity.method "{c.sparsity.method}"', on=lambda c: c.sparsity.enabled, sized=True, rows=(
        native_only("whose updates know no masks"),
        Rule(lambda c: c.optimizer.name in NOT_ELEMENTWISE,
             "{asked} with optimizer.name {c.optimizer.name!r}, which moves elements without a gradient; use adamw"),
        Conflict("fine_tuning.method", "which freezes these matrices", "leave one of the two out", allowed=("none",)),
        Conflict("offload.optimizer", "masks are taken from masters in memory", 'use "cpu" or "none"',
                 refused=("nvme",)),
        Conflict("quantisation.weights", "which has no zero", 'use "int8" or "int4"', refused=("binary",)),
    ), more=(_groups_of_four,)),
)


def _groups(config: RunConfig) -> list[str]:
    q, m, tp = config.quantisation, config.model, config.layout.tensor_parallel_size
    sizes = {
        "attention.qkv and mlp.up, model.hidden_size": (m.hidden_size, 1),
        "attention.output, heads × model.head_dim": (m.num_attention_heads * m.head_size, tp),
        "mlp.down, model.ffn_hidden_size": (m.ffn_size, tp),
        **{f"model.{name}": (getattr(m, name), 1) for name in ("qkv_rank", "output_rank", "up_rank", "down_rank")},
    }
    out = []
    for what, (size, ranks) in sizes.items():
        if size % ranks == 0 and size // ranks % q.group_size:  # what tp does not divide is the layout's problem
            each = f" / tensor_parallel_size {ranks} = {size // ranks} on a rank" if ranks > 1 else ""
            out.append(
                f"quantisation.group_size {q.group_size} does not divide the inputs of {what} {size}{each}: a group "
                "would be cut, or left short; use a divisor"
            )
    return out


FEW_BITS = (
    Table(asked="a [quantisation] section", sized=True,
          on=lambda c: not c.quantisation.enabled and c.quantisation != NO_QUANTISATION,
          rows=(Conflict("quantisation.weights", "which rounds nothing",
                         'set weights = "int8", "int4" or "binary", or leave the section out', refused=("none",)),)),
    Table(on=lambda c: c.quantisation.enabled, asked='quantisation.weights "{c.quantisation.weights}"', sized=True,
          rows=(
        native_only(),
        Conflict("precision.fp8", "which rounds the same weights otherwise", 'use fp8 = "none"', allowed=("none",)),
        Conflict("model.moe.num_experts", "products of experts have no few bits yet", "use dense layers"),
        Conflict("model.kv_lora_rank", "latent attention's products have no few bits yet", "use another attention"),
        Conflict("fine_tuning.method", "whose merged weights have other values", "leave one of the two out",
                 allowed=("none",)),
    ), more=(_groups,)),
)

_OVER_NVLINK = 'use "pairs" or "collective"'
EXCHANGES = (
    Table(asked='layout.tp_exchange "{c.layout.tp_exchange}"', on=lambda c: c.layout.tp_exchange != "collective", rows=(
        Rule(lambda c: c.layout.tensor_parallel_size > 1 and not c.layout.sequence_parallel,
             '{asked} needs layout.sequence_parallel: without it every rank has all rows; set it, or use "collective"'),
        Conflict("layout.tp_overlap_chunks", "the rows of each rank are the parts already", "use 0 or 1",
                 allowed=(0, 1)),
        native_only("whose backward pass exchanges gradients in the same way", 'use engine = "native" or "collective"'),
        Conflict("precision.fp8", "the rows of a rank would have scales of their own", 'use "collective", or fp8 = '
                 '"none"', allowed=("none",)),
        Conflict("quantisation.weights", "whose products see other weights", 'use "collective"', allowed=("none",)),
        Conflict("fine_tuning.method", "adapters have products of their own", 'use "collective"', allowed=("none",)),
    )),
    Table(asked='layout.tp_exchange "symm_mem"', on=lambda c: c.layout.tp_exchange == "symm_mem", rows=(
        Conflict("precision.dtype", "the ranks' products are added in bf16 as nobody proved for others", _OVER_NVLINK,
                 allowed=("bf16",)),
        Conflict("backend.device", "torch's operators over symmetric memory need NVIDIA GPUs and NVLink", _OVER_NVLINK,
                 refused=("cpu", "rocm")),
        Conflict("backend.share_devices", "a GPU has no link to itself", _OVER_NVLINK),
        Conflict("backend.graphs", "no graph has captured its waits for other ranks", 'use graphs = "off"',
                 refused=("step",)),
        Rule(lambda c: c.layout.tensor_parallel_size > max(c.hardware.domain_devices, c.cluster.gpus_per_node),
             "{asked} needs the {c.layout.tensor_parallel_size} tensor-parallel ranks in one NVLink domain, and a node "
             "of {c.cluster.name} has {c.cluster.gpus_per_node} GPUs; use fewer ranks, or \"pairs\""),
    )),
)
