"""transformers' GPT-2, GPT-NeoX or Llama with torch's scaled_dot_product_attention, trained by DeepSpeed: ZeRO stage 1
with bf16 weights and fp32 masters (fp32: no ZeRO), its fused optimizer, and optionally ``engine.compile()``."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare.hf_layers import ACTIVATIONS, Layers
from benchmarks.compare.peer import About, Unable, need
from benchmarks.compare.plain import decay_groups
from benchmarks.compare.sizes import OPTIMIZER, Size
from benchmarks.compare.weights import Weights
from megatron_port.core.errors import CheckpointError
from megatron_port.ext.deepspeed.prepare import prepare_deepspeed
from megatron_port.tools.interop.hf_config import family_for, hf_config
from megatron_port.tools.interop.hf_names import hf_tensors


def alone(device: torch.device) -> None:
    """A process group of one, for libraries that want one."""
    if torch.distributed.is_initialized():
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1",
                   "LOCAL_RANK": "0"}
    backend = "gloo" if device.type == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, rank=0, world_size=1)


def model_of(size: Size, weights: Weights, family: str) -> torch.nn.Module:
    """transformers' model with the common weights, fp32."""
    transformers = need("transformers")
    made = hf_config(size.model, dtype="float32", eos=None)
    made.pop("torch_dtype")
    config = transformers.AutoConfig.for_model(made.pop("model_type"), **made, attn_implementation="sdpa")
    config.use_cache = False
    for name in ("activation_function", "hidden_act"):  # of the same formula the one in a single operation
        if size.model.activation in ACTIVATIONS and hasattr(config, name):
            setattr(config, name, ACTIVATIONS[size.model.activation])
    with weights.device:
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    theirs = dict(model.named_parameters())
    filled = set()
    with torch.no_grad():
        for tensor in hf_tensors(size.model, family):
            target = theirs["lm_head.weight" if tensor.name not in theirs else tensor.name]
            ours = {mapped.name: mapped for mapped, _ in tensor.pieces}
            rows = {name: weights.read(name).reshape(mapped.rows, -1) for name, mapped in ours.items()}
            for mapped, run in tensor.pieces:
                part = rows[mapped.name][run.ours : run.ours + run.count]
                if mapped.transposed:
                    target[:, run.theirs : run.theirs + run.count] = part.t()
                else:
                    target[run.theirs : run.theirs + run.count] = part if target.dim() > 1 else part[:, 0]
            filled.add(id(target))
    left = [name for name, p in theirs.items() if id(p) not in filled]
    if left:
        raise Unable(f"parameters without a counterpart: {', '.join(left[:4])}")
    return model


class Training:
    """DeepSpeed's engine."""

    def __init__(self, size: Size, model: torch.nn.Module, device: torch.device, compile: bool) -> None:
        deepspeed = need("megatron_port.ext.deepspeed.deepspeed_import").deepspeed
        self.size, self.about = size, About({"attention": "sdpa", "compile": "engine.compile()" if compile else "off"})
        passes = size.global_batch // size.micro_batch
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": size.micro_batch, "gradient_accumulation_steps": passes,
            "gradient_clipping": OPTIMIZER.clip_grad, "steps_per_print": 10**12,
            "zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True,
        }
        if size.dtype == "bf16":
            config |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                       "data_types": {"grad_accum_dtype": "fp32"}}
        optimizer = self._optimizer(decay_groups(model), device)
        self.about.settings |= {"zero": str(config["zero_optimization"]["stage"]), "deepspeed": deepspeed.__version__}
        tables = {name: table.clone() for name, table in model.named_buffers() if table.is_floating_point()}
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for name, table in tables.items():  # transformers keeps rotary frequencies in fp32, bf16 would turn them
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, table)
        if compile:
            self.engine.compile()

    def _optimizer(self, groups: list[dict[str, Any]], device: torch.device) -> Any:
        """FusedAdam; CPUAdam on a CPU; torch's fused AdamW, and a handicap, where that op cannot be built."""
        settings: dict[str, Any] = {"lr": OPTIMIZER.lr, "betas": (OPTIMIZER.beta1, OPTIMIZER.beta2),
                                    "eps": OPTIMIZER.eps}
        adam = need("deepspeed.ops.adam")
        try:
            if device.type == "cpu":
                made = adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
            else:
                made = adam.FusedAdam(groups, adam_w_mode=True, **settings)
            self.about.settings["optimizer"] = type(made).__name__
            return made
        except Exception as error:  # the op is compiled when first used: compilers, headers, versions
            self.about.handicap = f"DeepSpeed's Adam could not be built ({type(error).__name__}: {str(error)[:120]})"
            self.about.settings["optimizer"] = "torch AdamW fused"
            return torch.optim.AdamW(groups, fused=True, **settings)

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See ``peer.Step``."""
        total: Any = 0.0
        passes = self.engine.gradient_accumulation_steps()
        for tokens, labels in zip(inputs.split(self.size.micro_batch), targets.split(self.size.micro_batch)):
            loss = self.engine(input_ids=tokens, labels=labels, shift_labels=labels).loss
            self.engine.backward(loss)
            self.engine.step()
            total = total + loss.detach() / passes
        return total, self.engine.get_global_grad_norm()


def build(size: Size, weights: Weights, device: torch.device, *, compile: bool) -> Training | Layers:
    """See ``peer.build``."""
    if size.layers_only:
        return Layers(size, weights, compile)
    try:
        family = family_for(size.model)
    except CheckpointError as error:
        raise Unable(str(error)) from error
    need("deepspeed")
    if device.type == "cpu":  # else it would compile collectives that nobody calls
        prepare_deepspeed()
    alone(device)
    return Training(size, model_of(size, weights, family), device, compile)
