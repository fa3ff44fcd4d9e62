"""DeepSpeed's engine at ZeRO 0 to 3, with a small GPT. The reference is its engine without ZeRO, on one process.

DeepSpeed averages gradients over ranks and micro-batches, so the loss is divided by the step's labels and multiplied by
both. It finds the norm in its update, so the update is done when the norm is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_port.ext.deepspeed.prepare import import_deepspeed
from megatron_port.tools.foreign.adapter import Adapter, Batch, World
from megatron_port.tools.foreign.adapters._gpt import Gpt, loss_sum

deepspeed = import_deepspeed()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DeepSpeedZero(Adapter):
    """Replicas, whose optimizer's state (1), gradients (2) and weights (3) are divided."""

    layout: ClassVar[Mapping[str, Any]] = {
        "stage": 0, "micro_batches": 1, "overlap": False, "reduce_scatter": True, "contiguous": True,
        "bucket": 500000000, "round_robin": False, "predivide": 1, "persistent": 100000,
    }
    """``bucket``: elements that are reduced together; ``persistent``: weights of fewer stay whole under stage 3."""
    model: ClassVar[Mapping[str, Any]] = {"dtype": "fp32", "clip": 0.0}
    space: ClassVar[Mapping[str, Any]] = {
        "stage": (0, 1, 2, 3), "micro_batches": (1, 2), "overlap": (False, True), "reduce_scatter": (True, False),
        "contiguous": (True, False), "bucket": (500000000, 3000), "round_robin": (False, True), "predivide": (1, 2),
        "persistent": (100000, 0), "clip": (0.0, 0.5), "dtype": ("fp32",),
    }
    ignored = -100

    def legal(self, options: Mapping[str, Any], size: int) -> str:
        if self.samples % (size * options["micro_batches"]):
            return "ranks x micro_batches does not divide the samples"
        if options["round_robin"] and options["stage"] not in (1, 2):
            return "round_robin is of stages 1 and 2"
        if options["predivide"] > 1 and options["stage"]:
            return "predivide is of stage 0"
        return ""

    def start(self, world: World) -> None:
        super().start(world)
        deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)

    def build(self, world: World) -> Any:
        model = Gpt(self.vocabulary, self.sequence).to(DTYPES[world["dtype"]])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": world["micro_batches"],
            "gradient_clipping": world["clip"], "bf16": {"enabled": world["dtype"] == "bf16"},
            "prescale_gradients": world["predivide"] > 1, "gradient_predivide_factor": float(world["predivide"]),
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": world["stage"], "overlap_comm": world["overlap"], "reduce_scatter": world["reduce_scatter"],
                "contiguous_gradients": world["contiguous"], "reduce_bucket_size": world["bucket"],
                "round_robin_gradients": world["round_robin"],
                "stage3_param_persistence_threshold": world["persistent"], "stage3_prefetch_bucket_size": 3000,
            },
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        self.stage, self.round_robin, self.updated = world["stage"], world["round_robin"], True
        return engine

    def modules(self, state: Any) -> list[tuple[str, nn.Module]]:
        return [("", state.module)]

    def parameters(self, state: Any) -> Mapping[str, Tensor]:
        """Return the parameters; under stage 3 they have to be gathered."""
        held = dict(state.module.named_parameters())
        if self.stage < 3:
            return held
        with deepspeed.zero.GatheredParameters(list(held.values())):
            return {name: parameter.detach().clone().requires_grad_() for name, parameter in held.items()}

    def load(self, state: Any, weights: Mapping[str, Tensor]) -> bool:
        if self.stage < 3:
            return False
        held = dict(state.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(held.values()), modifier_rank=0), torch.no_grad():
            for name, parameter in held.items():
                parameter.copy_(weights[name])
        for name, parameter in held.items():
            deepspeed.utils.safe_set_full_fp32_param(parameter, weights[name].float())
        return True

    def loaded(self, state: Any) -> None:
        if self.stage in (1, 2) or (self.stage == 0 and hasattr(state.optimizer, "refresh_fp32_params")):
            state.optimizer.refresh_fp32_params()

    def step(self, state: Any, batch: Batch, world: World) -> float:
        if not self.updated:  # of the sample before
            state.optimizer.zero_grad()
        self.updated = False
        labels = (batch.labels != self.ignored).sum()
        mine, total = batch.share(world.rank, world.size), torch.zeros((), dtype=torch.float64)
        count = world["micro_batches"]
        for index in range(count):
            micro = mine.share(index, count)
            loss = loss_sum(state(micro.tokens).float(), micro.labels) * (world.size * count / labels)
            state.backward(loss)
            total += loss.detach() / count
            if index < count - 1:
                state.step()
        torch.distributed.all_reduce(total)
        return float(total) / world.size

    def gradients(self, state: Any) -> Mapping[str, Tensor | None]:
        """Return them by DeepSpeed's function; none with round_robin, where 0.19.8 looks at another parameter's."""
        if self.round_robin:
            return {}
        found = {name: deepspeed.utils.safe_get_full_grad(p) for name, p in state.module.named_parameters()}
        return {name: None if g is None else g.to(state.module.norm.weight.dtype) for name, g in found.items()}

    def norm(self, state: Any) -> float | None:
        self.update(state)
        found = state.get_global_grad_norm()
        return None if found is None else float(found)

    def update(self, state: Any) -> None:
        if not self.updated:
            state.step()
        self.updated = True
