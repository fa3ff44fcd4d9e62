"""Megatron-core's GPTModel with its distributed data parallel wrapper and optimizer, or its layers alone. At its best
it uses Transformer Engine (its own recommendation); without it the local layers run and the peer is handicapped."""

from __future__ import annotations

import importlib.util
import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.compare.hf_deepspeed import alone
from benchmarks.compare.peer import About, Unable, autocast_dtype, gradient_norm, need
from benchmarks.compare.sizes import OPTIMIZER, Size
from benchmarks.compare.weights import Weights

ENGINE = "transformer_engine"


def _transformer_config(size: Size, about: About) -> Any:
    """As its documentation and Megatron-LM's defaults have it, with all fusions that run here."""
    config = need("megatron.core.transformer.transformer_config")
    engine = about.settings["layers"] == ENGINE
    m, low = size.model, size.dtype == "bf16"
    if m.activation not in ("gelu", "gelu_tanh", "swiglu"):
        raise Unable(f"no activation {m.activation}")
    activation = torch.nn.functional.silu if m.activation == "swiglu" else torch.nn.functional.gelu
    # What it fuses with a bias under the name of GeLU is the tanh form; exact GeLU it has only unfused.
    fused = m.activation == "swiglu" or (m.activation == "gelu_tanh" and m.add_bias)
    if m.activation == "gelu_tanh" and not fused:
        activation = _gelu_tanh
    wanted: dict[str, Any] = {
        "num_layers": m.num_layers, "hidden_size": m.hidden_size, "num_attention_heads": m.num_attention_heads,
        "num_query_groups": m.kv_heads, "kv_channels": m.head_size, "ffn_hidden_size": m.ffn_size,
        "layernorm_epsilon": m.norm_epsilon, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bf16": low,
        "params_dtype": autocast_dtype(size), "pipeline_dtype": autocast_dtype(size), "add_bias_linear": m.add_bias,
        "gated_linear_unit": m.activation == "swiglu", "activation_func": activation,
        "normalization": "RMSNorm" if m.normalization == "rmsnorm" else "LayerNorm", "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True, "bias_activation_fusion": fused,
        # Kernels of apex.
        "masked_softmax_fusion": importlib.util.find_spec("scaled_upper_triang_masked_softmax_cuda") is not None,
        "use_cpu_initialization": not torch.cuda.is_available(), "perform_initialization": False,
        "cross_entropy_loss_fusion": low,  # its gradient is rounded to bf16 whatever the logits are
        "apply_rope_fusion": engine and m.position_embedding == "rope",
        # Of layers alone nobody sums gradients.
        "gradient_accumulation_fusion": engine and not size.layers_only,
    }
    return config.TransformerConfig(**wanted)


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _spec(size: Size, about: About) -> Any:
    specs = need("megatron.core.models.gpt.gpt_layer_specs")
    norm = "RMSNorm" if size.model.normalization == "rmsnorm" else None
    try:
        need("transformer_engine.pytorch")
    except Unable as error:
        about.handicap = "; ".join(filter(None, [about.handicap, f"without Transformer Engine ({str(error)[:100]})"]))
        about.settings["layers"] = "local"
        return specs.get_gpt_layer_local_spec(**({"normalization": norm} if norm else {}))
    about.settings["layers"] = ENGINE
    return specs.get_gpt_layer_with_transformer_engine_spec()


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on "cuda"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _start(device: torch.device, about: About) -> None:
    """Its process groups and random streams."""
    state = need("megatron.core.parallel_state")
    if device.type == "cpu":
        # It allocates on "the current CUDA device" by name. In this process, which serves it alone, that is the
        # CPU, so that what runs on a GPU can be checked here; its time on a CPU says nothing.
        torch.cuda.current_device = lambda: device  # type: ignore[assignment,return-value]
        _OnCpu().__enter__()
        about.handicap = "Megatron-core is made for GPUs"
    alone(device)
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel()
    random = need("megatron.core.tensor_parallel.random")
    if device.type == "cuda":
        random.model_parallel_cuda_manual_seed(1)
    else:  # nothing is dropped, so no stream is needed
        random.get_cuda_rng_tracker().fork = nullcontext


def _mask(about: About, s: int, device: torch.device) -> Tensor | None:
    """Of what is hidden; Transformer Engine knows by itself that attention is causal."""
    if about.settings["layers"] == ENGINE:
        return None
    return torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu(1)


class Layers:
    """Forward and backward of its TransformerBlock in its own dtype: a rank's heads and MLP as those of a model of one
    rank, without communication."""

    def __init__(self, size: Size, weights: Weights, device: torch.device) -> None:
        self.about = About({"optimizer": "not used"})
        m = size.model
        _start(device, self.about)
        block = need("megatron.core.transformer.transformer_block")
        spec = _spec(size, self.about)
        config = _transformer_config(size, self.about)
        self.stack = block.TransformerBlock(config, spec, post_layer_norm=False).to(device, autocast_dtype(size))
        left = dict(self.stack.named_parameters())
        _fill_layers(left, weights, "")
        _none_left(left)
        self.mask, self.seq, self.rope = _mask(self.about, m.seq_length, device), m.seq_length, None
        if m.position_embedding == "rope":
            rotary = need("megatron.core.models.common.embeddings.rotary_pos_embedding")
            self.rope = rotary.RotaryEmbedding(
                kv_channels=m.head_size, rotary_percent=m.rotary_percent, rotary_base=int(m.rope_theta),
                use_cpu_initialization=device.type == "cpu",
            )

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See ``peer.Step``."""
        self.stack.zero_grad(set_to_none=True)
        x = inputs.detach().requires_grad_()
        out = self.stack(x, self.mask, rotary_pos_emb=None if self.rope is None else self.rope(self.seq))
        out.backward(targets)
        return out, x.grad

    def gradient_norm(self) -> Tensor:
        """See ``peer.LayerStep``."""
        return gradient_norm(self.stack)


class Training:
    """Whole optimizer steps: no-pipelining schedule, gradients in fp32 buckets, fp32 masters under bf16."""

    def __init__(self, size: Size, weights: Weights, device: torch.device) -> None:
        self.size, self.device, self.about = size, device, About({"optimizer": "Megatron-core's, fp32 masters"})
        m = size.model
        _start(device, self.about)
        spec = _spec(size, self.about)
        config = _transformer_config(size, self.about)
        self.model = self._model(config, spec).to(device, autocast_dtype(size))
        fill(self.model, weights)
        self.wrapped, self.optimizer = self._optimizer(config)
        s = m.seq_length
        self.positions = torch.arange(s, device=device)[None].expand(size.micro_batch, s)
        self.mask = _mask(self.about, s, device)

    def _model(self, config: Any, spec: Any) -> torch.nn.Module:
        """Transformer Engine adds up gradients within its products by itself; the head needs an extension of apex for
        that, and goes without where there is none."""
        m, layers = self.size.model, need("megatron.core.tensor_parallel.layers")
        learned, extension = m.position_embedding == "learned", layers._grad_accum_fusion_available
        layers._grad_accum_fusion_available = True
        try:
            model: Any = need("megatron.core.models.gpt").GPTModel(
                config=config, transformer_layer_spec=spec, vocab_size=m.vocab_size, max_sequence_length=m.seq_length,
                position_embedding_type="learned_absolute" if learned else "rope", rotary_base=int(m.rope_theta),
                share_embeddings_and_output_weights=m.tie_embeddings, parallel_output=True,
            )
        finally:
            layers._grad_accum_fusion_available = extension
        if not extension:
            model.output_layer.gradient_accumulation_fusion = False
        where = "in the products" if config.gradient_accumulation_fusion else "apart"
        self.about.settings["gradient sums"] = where + ("" if extension else "; the head's apart: no apex")
        return model  # type: ignore[no-any-return]

    def _optimizer(self, config: Any) -> tuple[Any, Any]:
        """Its wrapper and optimizer."""
        ddp = need("megatron.core.distributed")
        wrap = ddp.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        wrapped = ddp.DistributedDataParallel(config, wrap, self.model)
        optim, low = need("megatron.core.optimizer"), self.size.dtype == "bf16"
        settings = optim.OptimizerConfig(
            optimizer="adam", lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay, adam_beta1=OPTIMIZER.beta1,
            adam_beta2=OPTIMIZER.beta2, adam_eps=OPTIMIZER.eps, bf16=low,
            clip_grad=OPTIMIZER.clip_grad if self.device.type == "cuda" else 0.0,
            params_dtype=autocast_dtype(self.size), use_distributed_optimizer=False,
        )
        more: dict[str, Any] = {}
        if "config_overrides" in inspect.signature(optim.get_megatron_optimizer).parameters:
            more["config_overrides"] = optim.get_standard_config_overrides(settings)
        made = optim.get_megatron_optimizer(settings, [wrapped], **more)
        for group in made.param_groups:  # what its scheduler would do at each step
            group["weight_decay"] = OPTIMIZER.weight_decay * group.get("wd_mult", 1.0)
        return wrapped, made

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """See ``peer.Step``."""
        passes = self.size.global_batch // self.size.micro_batch
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        total: Any = 0.0
        for tokens, labels in zip(inputs.split(self.size.micro_batch), targets.split(self.size.micro_batch)):
            losses = self.wrapped(tokens, self.positions, self.mask, labels=labels)
            loss = losses.float().mean() / passes
            loss.backward()
            total = total + loss.detach()
        self.wrapped.finish_grad_sync()
        clipped = None if self.device.type == "cuda" else self._clip()
        _, norm, _ = self.optimizer.step()
        return total, norm if clipped is None else clipped

    def _clip(self) -> Tensor:
        """On a CPU, where its own clipping insists on CUDA tensors."""
        found = [p.main_grad for p in self.model.parameters()]
        norm = torch.nn.utils.get_total_norm(found)
        for g in found:
            g.mul_((OPTIMIZER.clip_grad / (norm + 1e-6)).clamp(max=1.0))
        return norm


def _put(left: dict[str, Tensor], target: str, weights: Weights, name: str) -> None:
    p = left.pop(target)
    p.copy_(weights.read(name).reshape(p.shape))


@torch.no_grad()
def _fill_layers(left: dict[str, Tensor], weights: Weights, prefix: str) -> None:
    """Take the layers' weights; its packed projection has our order of rows. ``left``: parameters not yet filled."""
    inside = {"attention.qkv": "self_attention.linear_qkv", "attention.output": "self_attention.linear_proj",
              "mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2"}
    for name in weights.shapes:
        if not name.startswith("layers."):
            continue
        module, _, kind = name.rpartition(".")
        _, index, part = module.split(".", 2)
        layer = f"{prefix}layers.{index}."
        if part in inside:
            _put(left, f"{layer}{inside[part]}.{kind}", weights, name)
            continue
        # Transformer Engine's layers keep a norm with the product that follows it.
        fused = {"norm1": f"self_attention.linear_qkv.layer_norm_{kind}", "norm2": f"mlp.linear_fc1.layer_norm_{kind}"}
        own = {"norm1": f"input_layernorm.{kind}", "norm2": f"pre_mlp_layernorm.{kind}"}
        _put(left, layer + (own[part] if layer + own[part] in left else fused[part]), weights, name)


def _none_left(left: dict[str, Tensor]) -> None:
    if left:
        raise Unable(f"parameters without a counterpart: {', '.join(list(left)[:4])}")


@torch.no_grad()
def fill(model: torch.nn.Module, weights: Weights) -> None:
    """Take the common weights of a whole model."""
    left: dict[str, Tensor] = dict(model.named_parameters())
    _put(left, "embedding.word_embeddings.weight", weights, "embedding.word.weight")
    for target, name in (("embedding.position_embeddings.weight", "embedding.position.weight"),
                         ("output_layer.weight", "head.weight")):
        if target in left:
            _put(left, target, weights, name)
    for kind in ("weight", "bias"):
        if f"final_norm.{kind}" in weights.shapes:
            _put(left, f"decoder.final_layernorm.{kind}", weights, f"final_norm.{kind}")
    _fill_layers(left, weights, "decoder.")
    _none_left(left)


def build(size: Size, weights: Weights, device: torch.device) -> Training | Layers:
    """See ``peer.build``."""
    need("megatron.core")
    if size.layers_only:
        return Layers(size, weights, device)
    if device.type == "cpu" and size.dtype != "fp32":
        raise Unable("Megatron-core's optimizer for bf16 weights takes CUDA tensors only")
    return Training(size, weights, device)
