"""Stand-ins for DeepEP and MORI with their interfaces, over gloo: which functions are called with what, and when.

What they give differs from torch's all-to-all where the libraries' does: rows of later ranks come first, memory is
undefined until an event is waited for (DeepEP) or is the operator's own and overwritten by its next call (MORI).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

CALLS: list[str] = []


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class _Way:
    """A handle: how many rows go where; what arrives is turned round by rank."""

    def __init__(self, experts: torch.Tensor, count: int, group: Any) -> None:
        ranks = dist.get_world_size(group)
        target = experts.flatten().long() // (count // ranks)
        assert bool((target.diff() >= 0).all()), "rows are not sorted by expert"
        sent = torch.bincount(target, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.group, self.sent, self.received = group, sent.tolist(), received.tolist()

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(_exchange(rows, self.sent, self.received, self.group).split(self.received)[::-1])

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(self.received[::-1])[::-1]
        return _exchange(torch.cat(parts), self.received, self.sent, self.group)


class _Event:
    """Rows are there once it has been waited for."""

    def __init__(self, memory: torch.Tensor | None = None, rows: torch.Tensor | None = None) -> None:
        self.memory, self.rows = memory, rows

    def current_stream_wait(self) -> None:
        if self.memory is not None and self.rows is not None:
            self.memory.copy_(self.rows)


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class _Buffer:
    """``deep_ep.Buffer``."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0 and num_rdma_bytes == 0
        self.group = group
        CALLS.append("buffer")

    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: _Config())
    capture = staticmethod(_Event)

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: _Event | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and topk_idx.shape[1] == 1 and previous_event is not None
        ranks = dist.get_world_size(self.group)
        to_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        to_rank = to_expert.view(ranks, -1).sum(1)
        inside = topk_idx // (num_experts // ranks) == torch.arange(ranks)
        return to_rank.int(), None, to_expert.int(), inside, _Event()

    def dispatch(
        self, x: torch.Tensor, handle: Any = None, num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None, is_token_in_rank: Any = None, num_tokens_per_expert: Any = None,
        topk_idx: Any = None, topk_weights: Any = None, num_worst_tokens: int = 0,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and async_finish and previous_event is not None
        CALLS.append("dispatch" if handle is None else "dispatch again")
        keys = None
        if handle is None:
            assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape == (len(x), 1)
            handle = _Way(topk_idx, len(num_tokens_per_expert), self.group)
            assert num_tokens_per_rank.tolist() == handle.sent and num_worst_tokens == sum(handle.received)
            assert bool((is_token_in_rank.sum(1) == 1).all())
            keys = handle.there(topk_weights)
        rows = handle.there(x)
        memory = torch.full_like(rows, float("nan"))
        return memory, topk_idx, keys, [], handle, _Event(memory, rows)

    def combine(
        self, x: torch.Tensor, handle: Any, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and async_finish and previous_event is not None
        CALLS.append("combine")
        rows = handle.back(x)
        memory = torch.full_like(rows, float("nan"))
        return memory, None, _Event(memory, rows)


deep_ep = SimpleNamespace(Buffer=_Buffer, topk_idx_t=torch.int64)


class _Operator:
    """``mori.ops.EpDispatchCombineOp``."""

    def __init__(self, config: SimpleNamespace) -> None:
        assert (config.num_experts_per_token, config.kernel_type) == (1, "intra")
        self.config = config
        self._out = torch.empty(config.world_size * config.max_num_inp_token_per_rank, config.hidden_dim,
                                dtype=config.data_type)
        self._back = torch.empty(config.max_num_inp_token_per_rank, config.hidden_dim, dtype=config.data_type)
        CALLS.append("buffer")

    def _filled(self, memory: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        memory.fill_(float("nan"))
        memory[: len(rows)] = rows
        return memory

    def dispatch(
        self, input: torch.Tensor, weights: torch.Tensor | None, scales: None, indices: torch.Tensor, *,
        routing: Any = None, return_routing: bool = False,
    ) -> tuple[Any, ...]:
        assert indices.dtype == torch.int32 and indices.shape == (len(input), 1) and input.is_contiguous()
        CALLS.append("dispatch again" if routing is not None else "dispatch")
        count = self.config.num_experts_per_rank * self.config.world_size
        way = routing if routing is not None else _Way(indices, count, dist.group.WORLD)
        keys = None if weights is None else torch.zeros(len(self._out), 1)
        if keys is not None and weights is not None:
            keys = self._filled(keys, way.there(weights))
        found = (self._filled(self._out, way.there(input)), keys, None, None, torch.tensor([sum(way.received)]))
        return (*found, way) if return_routing else found

    def combine(
        self, input: torch.Tensor, weights: None, indices: torch.Tensor, *, routing: Any
    ) -> tuple[torch.Tensor, None]:
        assert len(indices) == sum(routing.sent) and input.is_contiguous()
        CALLS.append("combine")
        return self._filled(self._back, routing.back(input)), None


mori_ops = SimpleNamespace(
    EpDispatchCombineOp=_Operator, EpDispatchCombineConfig=SimpleNamespace,
    EpDispatchCombineKernelType=SimpleNamespace(IntraNode="intra", InterNodeV1="inter"),
)
mori_shmem = SimpleNamespace(shmem_torch_process_group_init=lambda name: CALLS.append(f"shmem {bool(name)}"))
