"""Megatron-core's GPTModel: its layers, schedules, reduction and optimizer, without Transformer Engine.

It runs on a CPU by ``foreign.shims``: ``cuda_on_cpu``, ``fp64_stays``, ``no_streams``, ``no_device_random``,
``no_compiler``, ``gloo_unequal``, ``hold_in_recompute``, ``megatron_norms``, ``megatron_names`` and
``megatron_dispatcher`` always, ``GatheredAttention`` with cp and mla.

The reference takes the same micro-batches, one after the other. So losses that are means over a micro-batch, as those
that balance experts are, have to come out the same.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from megatron_port.tools.foreign import shims
from megatron_port.tools.foreign.adapter import PREFIXES, Adapter, Batch, Placement, Shard, World

with shims.no_compiler(), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # on what is not installed
    import megatron.core.distributed as distributed
    import megatron.core.optimizer as optim
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

WIDTH, HEADS = 32, 4


class State(NamedTuple):
    """A rank's part of the trainer."""

    chunks: list[Any]
    """DistributedDataParallel, one a stage of the pipeline that this rank has."""
    optimizer: Any
    config: Any


class MegatronCore(Adapter):
    """Axes as Megatron orders them: pp, dp (of which ep is a part), cp, tp."""

    layout: ClassVar[Mapping[str, Any]] = {
        "tp": 1, "sp": False, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 0, "distributed_optimizer": False,
        "overlap": False, "recompute": False, "dispatcher": "alltoall", "batch_p2p": False,
    }
    """``etp``: 0 is tp. ``batch_p2p``: with vpp, messages of stages are batched and not overlapped, which Megatron-LM's
    arguments refuse for pp 2, and its core does not."""
    model: ClassVar[Mapping[str, Any]] = {
        "fp64": True, "layers": 2, "micro_batch": 2, "swiglu": True, "rmsnorm": True, "bias": False, "rope": True,
        "tied": False, "qk_norm": False, "groups": 4, "mla": False, "sinks": False, "mtp": 0, "experts": 0,
        "balance": "none", "z_loss": False, "shared_expert": False, "padded": False, "per_token": True, "clip": True,
        "main_loss": True,
    }
    """``padded``: the router is told which positions have no label. ``main_loss`` False: only losses that are added in
    the backward pass, of routers and of further tokens, are left."""
    space: ClassVar[Mapping[str, Any]] = {
        "tp": (1, 2, 4), "sp": (False, True), "pp": (1, 2), "vpp": (1, 2), "ep": (1, 2, 4),
        "distributed_optimizer": (False, True), "overlap": (False, True), "recompute": (False, True),
        "dispatcher": ("alltoall", "allgather"), "fp64": (True,), "layers": (2, 4), "micro_batch": (1, 2),
        "swiglu": (True, False), "rmsnorm": (True, False), "bias": (False, True), "rope": (True, False),
        "tied": (False, True), "qk_norm": (False, True), "groups": (4, 2), "experts": (0, 4),
        "balance": ("none", "aux_loss", "seq_aux_loss"), "shared_expert": (False, True), "per_token": (True, False),
        "clip": (True, False),
    }
    ignored = -100

    def legal(self, options: Mapping[str, Any], size: int) -> str:
        o = options
        dense, tp = o["tp"] * o["pp"] * o["cp"], o["tp"]
        etp = o["etp"] or tp
        for wrong, why in (
            (size % dense, f"tp x pp x cp = {dense} does not divide them"),
            (o["sp"] and tp == 1, "sp needs tp"),
            (o["groups"] % tp or (o["mla"] and HEADS % tp), "tp does not divide the groups"),
            (o["vpp"] > 1 and o["pp"] == 1, "vpp needs pp"),
            (o["layers"] % (o["pp"] * o["vpp"]), "pp x vpp does not divide the layers"),
            (o["experts"] and tp > 1 and not o["sp"], "Megatron trains experts under tp with sp alone"),
            (not o["experts"] and (o["ep"] > 1 or o["balance"] != "none" or o["z_loss"] or o["shared_expert"]
                                   or o["padded"] or o["etp"]), "an option of experts without experts"),
            (o["experts"] and o["bias"], "0.16.1 adds an expert's bias in place, which autograd refuses"),
            (o["experts"] and o["experts"] % o["ep"], "ep does not divide the experts"),
            (size % (etp * o["ep"] * o["pp"]), "etp x ep x pp does not divide the ranks"),
            (not o["etp"] and (size // max(1, dense)) % o["ep"], "ep does not divide dp"),
            (o["recompute"] and o["mtp"], "recompute with mtp is not tried"),
            (o["mla"] and o["cp"] > 1, "mla with cp is not tried"),
            (o["sinks"] and o["cp"] > 1, "sinks with cp are not tried"),
        ):
            if wrong:
                return why
        dp = size // dense
        micro = self.samples // dp // o["micro_batch"]
        if self.samples % (dp * o["micro_batch"]):
            return "dp x micro_batch does not divide the samples"
        return "vpp needs micro-batches in multiples of pp" if o["vpp"] > 1 and micro % o["pp"] else ""

    def axes(self, world: World) -> Mapping[str, int]:
        tp, pp, cp = world["tp"], world["pp"], world["cp"]
        dp, ep = world.size // (tp * pp * cp), world["ep"]
        if dp % ep:
            return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        return {"pp": pp, "dp": dp // ep, "ep": ep, "cp": cp, "tp": tp}

    def start(self, world: World) -> None:
        shims.cuda_on_cpu()
        if world["fp64"]:
            shims.fp64_stays()
        shims.hold_in_recompute(tensor_parallel.random.CheckpointFunction)
        shims.no_streams()
        shims.no_device_random()
        shims.megatron_norms()
        shims.megatron_names()
        shims.gloo_unequal()
        shims.megatron_dispatcher()
        super().start(world)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=world["tp"], pipeline_model_parallel_size=world["pp"],
            virtual_pipeline_model_parallel_size=world["vpp"] if world["vpp"] > 1 else None,
            context_parallel_size=world["cp"], expert_model_parallel_size=world["ep"],
            expert_tensor_parallel_size=world["etp"] or None,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)

    def build(self, world: World) -> State:
        config = _config(world)
        self.layers: dict[tuple[int, int], int] = {}
        self.experts, self.tied = max(1, world["experts"]) // world["ep"], world["tied"]
        self.parts = world["pp"] * world["vpp"] * world["cp"] > 1
        models = [self._chunk(world, config, stage) for stage in range(world["vpp"])]
        wrap = distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=world["distributed_optimizer"], overlap_grad_reduce=world["overlap"],
            bucket_size=4000 if world["overlap"] else None,
        )
        chunks = [distributed.DistributedDataParallel(config, wrap, model, disable_bucketing=stage > 0)
                  for stage, model in enumerate(models)]
        settings = optim.OptimizerConfig(
            optimizer="adam", lr=1e-3, weight_decay=0.1, adam_eps=1e-5, clip_grad=0.5 if world["clip"] else 0.0,
            params_dtype=config.params_dtype, use_distributed_optimizer=world["distributed_optimizer"],
        )
        made = optim.get_megatron_optimizer(
            settings, chunks, config_overrides=optim.get_standard_config_overrides(settings)
        )
        for group in made.param_groups:  # what its scheduler does at each step
            group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = made.scale_loss
        if world["overlap"]:
            syncs = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        return State(chunks, made, config)

    def _chunk(self, world: World, config: Any, stage: int) -> Any:
        """Return the model of one stage."""
        vp = stage if world["vpp"] > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp)
        spec = specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp
        )
        if world["cp"] > 1 or world["mla"]:
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = shims.GatheredAttention
        more = {}
        if world["mtp"]:
            more["mtp_block_spec"] = specs.get_gpt_mtp_block_spec(config, spec, False, vp_stage=vp)
        model = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=self.vocabulary, max_sequence_length=self.sequence,
            pre_process=first, post_process=last, parallel_output=True,
            position_embedding_type="rope" if world["rope"] else "learned_absolute",
            share_embeddings_and_output_weights=world["tied"], vp_stage=vp, **more,
        )
        for name, module in model.named_modules():
            if isinstance(module, TransformerLayer) and name.startswith("decoder.layers."):
                self.layers[stage, int(name.split(".")[2])] = module.layer_number - 1
        return model.to(config.params_dtype)

    def step(self, state: State, batch: Batch, world: World) -> float | None:
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        dp, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        mine = batch.share(dp, size)
        micro = min(world["micro_batch"], len(mine))
        parts = [mine[i : i + micro] for i in range(0, len(mine), micro)]
        forward_backward = get_forward_backward_func()
        reports = forward_backward(
            forward_step_func=partial(_forward, world=world), data_iterator=[iter(parts) for _ in state.chunks],
            model=state.chunks, num_microbatches=len(parts), seq_length=self.sequence, micro_batch_size=micro,
            forward_only=False,
        )
        if not reports:
            return None
        sums = torch.stack(reports)
        if world["per_token"]:
            total = sums.sum(0)
            torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(True))
            return float(total[0] / total[1])
        torch.distributed.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        mean = (sums[:, 0] / sums[:, 1]).mean()
        torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        return float(mean) / float(size)

    def update(self, state: State) -> None:
        state.optimizer.step()

    def modules(self, state: State) -> Iterable[tuple[str, nn.Module]]:
        for stage, chunk in enumerate(state.chunks):
            yield f"{stage}.", chunk

    def name(self, name: str) -> str:
        stage, _, name = name.partition(".")
        name = PREFIXES.sub("", f"{name.strip('.')}.").removesuffix(".")
        if self.parts and name in ("", "decoder", "mtp"):
            return ""  # what a rank returns is not what the whole does
        name = re.sub(r"^decoder\.layers\.(\d+)",
                      lambda found: f"decoder.layers.{self.layers[int(stage), int(found[1])]}", name)
        if self.tied and name == "output_layer.weight":
            return "embedding.word_embeddings.weight"
        offset = parallel_state.get_expert_model_parallel_rank() * self.experts
        return re.sub(r"(?<=local_experts\.)\d+", lambda found: str(int(found[0]) + offset), name)

    def placements(self, state: State, world: World) -> Mapping[str, Placement]:
        """State what Megatron's attributes do not: a gate and what it gates are packed by rank, experts have a division
        of their own, and sinks are divided by head."""
        tp = parallel_state.get_tensor_model_parallel_rank(), world["tp"]
        etp = parallel_state.get_expert_tensor_parallel_rank(), world["etp"] or world["tp"]
        found: dict[str, Placement] = {}
        for name, parameter in self.parameters(state).items():
            expert = ".local_experts." in name
            place = etp if expert else tp
            if name.endswith("softmax_offset"):
                found[name] = Shard(0, *place)
            elif "linear_fc1" in name and world["swiglu"]:
                found[name] = Shard(0, *place, interleaved=2)
            elif expert:
                divided = getattr(parameter, "tensor_model_parallel", False)
                found[name] = Shard(int(parameter.partition_dim), *place) if divided else None  # type: ignore[attr-defined]
        return found

    def loaded(self, state: State) -> None:
        state.optimizer.reload_model_params()

    def gradients(self, state: State) -> Mapping[str, Tensor | None]:
        """Return ``main_grad``. The distributed optimizer leaves a rank a part of each bucket, so they are gathered."""
        found: dict[str, Tensor | None] = {}
        for stage, chunk in enumerate(state.chunks):
            whole = _gathered(chunk) if chunk.ddp_config.use_distributed_optimizer else {}
            for name, parameter in chunk.named_parameters():
                found[self.name(f"{stage}.{name}")] = whole.get(parameter, parameter.main_grad)
        return found

    def norm(self, state: State) -> float:
        state.optimizer.prepare_grads()
        return float(state.optimizer.get_grad_norm())


def _config(world: World) -> Any:
    """Return Megatron's configuration."""
    dtype = torch.float64 if world["fp64"] else torch.float32
    wanted: dict[str, Any] = {
        "num_layers": world["layers"], "hidden_size": WIDTH, "num_attention_heads": HEADS,
        "num_query_groups": world["groups"], "ffn_hidden_size": 48, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "params_dtype": dtype, "pipeline_dtype": dtype, "add_bias_linear": world["bias"],
        "gated_linear_unit": world["swiglu"],
        "activation_func": torch.nn.functional.silu if world["swiglu"] else torch.nn.functional.gelu,
        "normalization": "RMSNorm" if world["rmsnorm"] else "LayerNorm", "qk_layernorm": world["qk_norm"],
        "tensor_model_parallel_size": world["tp"], "sequence_parallel": world["sp"],
        "pipeline_model_parallel_size": world["pp"], "context_parallel_size": world["cp"],
        "virtual_pipeline_model_parallel_size": world["vpp"] if world["vpp"] > 1 else None,
        "expert_model_parallel_size": world["ep"], "expert_tensor_parallel_size": world["etp"] or None,
        "calculate_per_token_loss": world["per_token"], "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "bias_activation_fusion": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False,
        "overlap_p2p_comm": world["vpp"] > 1 and not world["batch_p2p"],
        "batch_p2p_comm": world["vpp"] == 1 or world["batch_p2p"],
        "persist_layer_norm": False, "softmax_type": "learnable" if world["sinks"] else "vanilla",
    }
    if world["recompute"]:
        wanted |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if world["mtp"]:
        wanted |= {"mtp_num_layers": world["mtp"], "mtp_loss_scaling_factor": 0.3}
    if world["experts"]:
        wanted |= {
            "num_moe_experts": world["experts"], "moe_ffn_hidden_size": 24, "moe_router_topk": 2,
            "moe_router_dtype": "fp64" if world["fp64"] else "fp32", "moe_token_dispatcher_type": world["dispatcher"],
            "moe_router_load_balancing_type": world["balance"], "moe_aux_loss_coeff": 0.5,
            "moe_z_loss_coeff": 0.05 if world["z_loss"] else None, "moe_permute_fusion": False,
            "moe_shared_expert_intermediate_size": 24 if world["shared_expert"] else None,
        }
    if not world["mla"]:
        return TransformerConfig(**wanted)
    del wanted["num_query_groups"]
    return MLATransformerConfig(
        **wanted, multi_latent_attention=True, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4,
        v_head_dim=8, rope_type="rope",
    )


def _forward(parts: Iterator[Batch], model: Any, *, world: World) -> tuple[Tensor, Any]:
    """Run one micro-batch as Megatron's training script does: this rank's positions of it."""
    micro = next(parts)
    length, cp = micro.tokens.shape[1], world["cp"]
    at = shims.zigzag(length, parallel_state.get_context_parallel_rank(), cp) if cp > 1 else torch.arange(length)
    tokens, labels = micro.tokens[:, at], micro.labels[:, at]
    mask = (labels >= 0).to(torch.float64 if world["fp64"] else torch.float32)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    more = {"padding_mask": labels < 0} if world["padded"] else {}
    losses = model(tokens, at.expand(len(tokens), -1), hidden, labels=labels.clamp(min=0), loss_mask=mask, **more)
    return losses, partial(_loss, mask, float(world["main_loss"]))


def _loss(mask: Tensor, weight: float, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum and number of labels, as Megatron's training script has them, and both to report."""
    total, count = (losses * mask).sum(), mask.sum()
    return weight * total, count.to(torch.int), torch.stack([total.detach(), count.to(total.dtype)])


def _gathered(chunk: Any) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of a chunk, of whose buckets each rank has a part."""
    found: dict[nn.Parameter, Tensor] = {}
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        group, data = buffer.data_parallel_group, buffer.grad_data.clone()
        for bucket in buffer.buckets:
            part = bucket.grad_data.chunk(group.size())[group.rank()].contiguous()
            parts = [torch.empty_like(part) for _ in range(group.size())]
            torch.distributed.all_gather(parts, part, group=group)
            data[bucket.offset : bucket.offset + bucket.grad_data.numel()] = torch.cat(parts)
        for parameter, (start, end, _) in buffer.param_index_map.items():
            found[parameter] = data[start:end].view(parameter.shape)
    return found
