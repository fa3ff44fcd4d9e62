"""Choice of what serves layers of experts: the router, the moving of rows, and their exchange between ranks, which is
torch's all-to-all or a library that is installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_port.core.config.model import MoEConfig
from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.layers.providers import ProviderRow
from megatron_port.core.registry import PARTS
from megatron_port.ext.kernels.choose import Candidate, Chooser
from megatron_port.ext.kernels.kernels import optional_import
from megatron_port.ext.kernels.ops import experts as expert_rows
from megatron_port.ext.kernels.ops import experts as router

# The own provider of a layer of experts: the router and the moving of rows by own kernels (``experts.experts``).

class Routed(NamedTuple):
    """Result of the router (``experts.torch_ops.Routed``)."""

    experts: Tensor
    weights: Tensor
    scores: Tensor
    margin: Tensor


class OwnExperts:
    """Router and rows through ``kernels.ops`` (``experts.experts.ExpertOps``); ``kernels.load`` must have run."""

    def gather_rows(self, x: Tensor, source: Tensor) -> Tensor:
        return expert_rows.gather_rows(x.contiguous(), source)

    def sum_rows(self, y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
        return expert_rows.sum_rows(y.contiguous(), place, weight)

    def sum_rows_backward(self, grad: Tensor, y: Tensor, place: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return expert_rows.sum_rows_backward(grad.contiguous(), y, place, weight)

    def route(self, logits: Tensor, bias: Tensor | None, routing: Any, given: Tensor | None = None) -> Routed:
        return Routed(*router.route(
            logits.contiguous(), bias, None if given is None else given.contiguous(), k=routing.k,
            sigmoid=routing.score == "sigmoid", groups=routing.groups, top_groups=routing.top_groups,
            two=routing.group_score == "top2", normalise=routing.normalise, scale=routing.scale,
        ))

    def route_backward(
        self, scores: Tensor, experts: Tensor, dweights: Tensor | None, dscores: Tensor | None, routing: Any
    ) -> Tensor:
        return router.route_backward(
            scores, experts, None if dweights is None else dweights.contiguous(),
            None if dscores is None else dscores.contiguous(), sigmoid=routing.score == "sigmoid",
            normalise=routing.normalise, scale=routing.scale,
        )


def own_limit(experts: int, top_k: int, groups: int) -> str:
    """Return why the own router cannot serve a layer of this size, or nothing."""
    most, choices = router.MOST_EXPERTS, router.MOST_CHOICES
    if experts <= most and top_k <= choices and groups <= choices:
        return ""
    return (f"the own router takes at most {most} experts, {choices} choices and {choices} groups, not {experts}, "
            f"{top_k} and {groups}")


own_experts = OwnExperts()


KINDS = {"deepep": "cuda", "mori": "rocm"}
"""The devices that libraries are for."""
MODULES = {"deepep": ("deep_ep",), "mori": ("mori.ops", "mori.shmem")}
"""Their modules, of which an exchange takes what they have."""
DTYPES = {"deepep": (torch.bfloat16,), "mori": (torch.bfloat16, torch.float32)}


def choose_exchange(
    config: BackendConfig, device: DeviceInfo, dtype: torch.dtype
) -> tuple[Callable[..., Any] | None, ProviderRow]:
    """Return what ``backend.experts_exchange`` asks for (None: torch's all-to-all) and its row of the table.

    Raises:
        EnvironmentFault: it cannot serve here; the message says what is missing.
    """
    asked = config.experts_exchange
    if asked == "torch":
        return None, ProviderRow("experts_exchange", "torch", "all_to_all_single")
    problem = ""
    if device.kind != KINDS[asked]:
        problem = f"it needs a GPU of {'AMD' if asked == 'mori' else 'NVIDIA'}, not {device.kind}"
    elif dtype not in DTYPES[asked]:
        names = " or ".join(str(d).removeprefix("torch.") for d in DTYPES[asked])
        problem = f"it moves {names}, not {str(dtype).removeprefix('torch.')}"
    found = [] if problem else [optional_import(name) for name in MODULES[asked]]
    problem = problem or next((why for _, why in found if why), "")
    if problem:
        raise EnvironmentFault(
            f'backend.experts_exchange = "{asked}" cannot serve: {problem}; set backend.experts_exchange = "torch"'
        )
    modules = [module for module, _ in found]
    made = PARTS.function(f"token dispatch, {asked}")(*modules)
    return made, ProviderRow("experts_exchange", asked, "asked for; a row for each copy of a token, as torch's")


def choose_ops(chooser: Chooser, moe: MoEConfig) -> tuple[OwnExperts | None, ProviderRow]:
    """Choose the router and the moving of rows of layers of experts; None: torch's. Raises EnvironmentFault."""
    own = chooser.own(lambda: own_experts)
    own = dataclasses.replace(own, problem=own.problem or own_limit(moe.num_experts, moe.top_k, moe.groups))
    return chooser.pick("experts", [own, Candidate("torch", "", lambda: None)])


def choose_experts(
    chooser: Chooser, moe: MoEConfig
) -> tuple[OwnExperts | None, Any, list[ProviderRow]]:
    """Return router and moving of rows, exchange of rows (None: torch's), and both rows of the table.

    Raises EnvironmentFault.
    """
    ops, row = choose_ops(chooser, moe)
    exchange, exchange_row = choose_exchange(chooser.config, chooser.device, chooser.dtype)
    return ops, exchange, [row, exchange_row]
