"""SmolLM3: Llama's layer, of which every fourth knows no positions."""

from __future__ import annotations

from typing import Any

from megatron_port.core.config.schema import ModelConfig
from megatron_port.ext.families.family import Family, Fields, windows_by_layer_there
from megatron_port.ext.families.llama import NAMES
from megatron_port.ext.families.settings import shortest_pattern
from megatron_port.ext.families.shared import one_bias, read_llama_like, write_llama_like


def read(f: Fields) -> dict[str, Any]:
    """Fields of a model."""
    values = read_llama_like(f, hidden=2048, ffn=11008, vocab=128256, length=32768, groups=4, theta=2000000.0,
                             layers=36, heads=16, tied=True)
    layers = values["num_layers"]
    if f.values.get("use_sliding_window") and not f.values.get("layer_types"):
        raise f.fault("use_sliding_window without layer_types: it does not say which layers have a window")
    values |= f.windows_by_layer(layers)
    every = f.get("no_rope_layer_interval", 4)
    rotates = f.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(layers)])
    if len(rotates) < layers or any(one not in (0, 1) for one in rotates):
        raise f.fault(f"no_rope_layers is {rotates!r:.80}; expected 0 or 1 for each of {layers} layers")
    pattern = shortest_pattern(["rope" if one else "none" for one in rotates[:layers]])
    return values | {"add_bias": one_bias(f), "rope_pattern": () if pattern == ("rope",) else pattern}


def write(model: ModelConfig) -> dict[str, Any]:
    """Fields of a config.json."""
    return write_llama_like(model) | {
        "attention_bias": model.add_bias, "mlp_bias": model.add_bias, **windows_by_layer_there(model),
        "no_rope_layers": [int(model.rotates(i)) for i in range(model.num_layers)],
    }


FAMILY = Family(
    name="smollm3", architecture="SmolLM3ForCausalLM", read=read, write=write, names=NAMES,
    harmless=frozenset({"pretraining_tp"}),  # the same products, in slices
)
