"""transformers' model of a folder, one module's weights in memory at a time: the other side of the check of an export.

From version 5 on its modules hold all experts of a layer in one tensor, which files do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.ext.families import family_named
from megatron_port.tools.interop.hf_files import HFFolder


def norm_weights(model: ModelConfig) -> set[str]:
    """Canonical names of what the check does not scale."""
    return {p.name for p in model_spec(model).parameters() if p.init != "normal" and p.name.endswith(".weight")}


def loaded_by(transformers: Any, folder: Path) -> nn.Module:
    """Return transformers' model of a folder in fp32, loaded by itself: none of our reading is in it. Code of the
    folder's is not run, and pickles are not read."""
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, use_safetensors=True, attn_implementation="eager",
        experts_implementation="eager", dtype=torch.float32,
    )
    return model.eval()


def scaled_logits(network: nn.Module, source: HFFolder, tokens: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Logits [batch, seq, vocab] of transformers' model, whose weights but norms are multiplied by ``scale`` first."""
    norms = {run.tensor for name in norm_weights(source.model) for run in source.mapping[name].runs}
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name not in norms:
                parameter.mul_(scale)
        out: torch.Tensor = network(tokens, use_cache=False).logits
    return out


def their_logits(transformers: Any, folder: Path, tokens: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Logits [batch, seq, vocab] of transformers' model of a folder in fp32, one module's weights at a time."""
    source = HFFolder(folder)
    config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    network.eval()
    _real_buffers(network, config, source)
    norms = {run.tensor for name in norm_weights(source.model) for run in source.mapping[name].runs}
    names: dict[int, str] = {}
    parameters = list(network.named_parameters(remove_duplicate=False))
    for name, parameter in (*((n, p) for n, p in parameters if source.tensor_known(n)), *parameters):
        names.setdefault(id(parameter), name)
    for module in network.modules():
        own = dict(module.named_parameters(recurse=False))
        if own:
            _stream(module, {key: names[id(p)] for key, p in own.items()}, source, norms, scale)
    with torch.no_grad():
        out: torch.Tensor = network(tokens, use_cache=False).logits
    return out


def _real_buffers(network: nn.Module, config: Any, source: HFFolder) -> None:
    """Compute the buffers that no file has (rotary frequencies, causal masks) by their module's constructor; read the
    others."""
    for path, parent in list(network.named_modules()):
        for name, child in list(parent.named_children()):
            if not any(b.is_meta for b in child.buffers(recurse=False)):
                continue
            if hasattr(child, "scalar_embed_scale"):  # Gemma's embedding, made of sizes
                child.register_buffer("embed_scale", torch.tensor(child.scalar_embed_scale), persistent=False)
                continue
            made = type(child)(config)
            if next(made.parameters(), None) is None:
                setattr(parent, name, made)
            else:  # its parameters stay, which may be tied to another module's
                for key, buffer in made.named_buffers(recurse=False):
                    saved = source.tensor(f"{path}.{name}.{key}")
                    child.register_buffer(key, buffer if saved is None else saved.float(), persistent=False)


def _stream(module: nn.Module, own: dict[str, str], source: HFFolder, norms: set[str], scale: float) -> None:
    """Give ``module`` its parameters before it runs and take them away afterwards."""
    empty = dict(module.named_parameters(recurse=False))

    def load(*_: Any) -> None:
        for key, name in own.items():
            tensor = _loaded(source, name, empty[key].shape[0])
            if tensor is None:
                raise CheckpointError(f"{source.path}: transformers' model has a parameter {name}, the export has none")
            value = tensor.float() * (1.0 if name in norms else scale)
            module.register_parameter(key, nn.Parameter(value, requires_grad=False))

    def drop(*_: Any) -> None:
        for key in own:
            module.register_parameter(key, empty[key])

    module.register_forward_pre_hook(load)
    module.register_forward_hook(drop)


def _loaded(source: HFFolder, name: str, experts: int) -> torch.Tensor | None:
    """Return a parameter of transformers': as it is in the files or, of all experts, put together from theirs."""
    names = family_named(source.family).names
    for there, loaded in names.loaded.items():
        name = name if source.tensor_known(name) else name.replace(loaded, there)
    if source.tensor_known(name):
        return source.tensor(name)
    block, _, part = name.rpartition(".")
    each = names.inside.get({"gate_up_proj": "mlp.experts.up", "down_proj": "mlp.experts.down"}.get(part, ""))
    if each is None or not block.endswith(".experts"):
        return None
    parts = (each,) if isinstance(each, str) else each
    before = block.removesuffix(parts[0].partition(".{}")[0])
    of_one = ([source.tensor(f"{before}{p.format(e)}.weight") for p in parts] for e in range(experts))
    return torch.stack([torch.cat([t for t in tensors if t is not None]) for tensors in of_one])
