"""Libraries that move rows of tokens between the ranks that share a layer's experts, in place of torch.

One manifest states what a forward pass of a layer exchanges; a transport made from it moves the rows to their experts,
the results back, and in the backward pass the gradients of both. Each row is a token's copy for one expert and travels
by itself: nothing is added up on the way, so results have the bits that torch's all-to-all gives.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_port.ext.experts.experts import Arriving, Manifest


def arrangement(keys: torch.Tensor, manifest: Manifest) -> torch.Tensor:
    """Return where in what arrived the rows are in the order of an all-to-all, by rank and place: int64 [received].

    Raises:
        RuntimeError: another number of rows arrived than was announced.
    """
    if len(keys) != sum(manifest.received):
        raise RuntimeError(
            f"{len(keys)} rows arrived in an exchange of experts, and {sum(manifest.received)} were announced; use "
            'backend.experts_exchange = "torch"'
        )
    return keys.flatten().argsort()


# Exchange of experts' rows by DeepEP (https://github.com/deepseek-ai/DeepEP).
#
# Its ``Buffer`` is used, whose kernels are compiled when the package is built; ``ElasticBuffer`` compiles at run time,
# which is not allowed here. DeepEP sends a token once to each rank and adds its experts' results up in bfloat16. Here
# each copy is a token of its own with one expert: more bytes, and the bits of torch's exchange on any layout.

NODE = 8
"""GPUs of a node that DeepEP reaches without the network."""


class DeepEP:
    """Maker of transports; one DeepEP buffer for each group of ranks and width of rows."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._buffers: dict[tuple[int, int], Any] = {}

    def __call__(self, manifest: Manifest) -> DeepEPTransport:
        return DeepEPTransport(self, manifest)

    def buffer(self, group: Any, row_bytes: int) -> Any:
        """Return the communication buffer for rows of so many bytes. Collective when first asked for."""
        found = self._buffers.get((id(group), row_bytes))
        if found is None:
            kind, ranks = self.module.Buffer, group.size()
            configs = (kind.get_dispatch_config(ranks), kind.get_combine_config(ranks))
            inside = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
            outside = max(config.get_rdma_buffer_size_hint(row_bytes, ranks) for config in configs)
            found = self._buffers[id(group), row_bytes] = kind(group, inside, outside)
        return found


class DeepEPTransport:
    """Rows of one forward pass of a layer (``RowTransport``)."""

    def __init__(self, maker: DeepEP, manifest: Manifest) -> None:
        self.maker, self.manifest = maker, manifest
        self._handle: Any = None
        self._keys = torch.empty(0)

    def start(self, rows: torch.Tensor, *, to_experts: bool) -> Arriving:
        buffer = self.maker.buffer(self.manifest.group, rows.shape[1] * rows.itemsize)
        queued = {
            "previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True,
        }
        if not to_experts:
            arriving, _, event = buffer.combine(rows, self._handle, **queued)
        elif self._handle is None:
            arriving, event = self._first(buffer, rows, queued)
        else:
            arriving, *_, event = buffer.dispatch(rows, handle=self._handle, **queued)

        def wait() -> torch.Tensor:
            event.current_stream_wait()
            out: torch.Tensor = arriving
            return out

        return Arriving(arriving, wait)

    def _first(self, buffer: Any, rows: torch.Tensor, queued: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Exchange rows whose way the buffer does not know yet."""
        manifest = self.manifest
        experts = manifest.expert_of_row().to(self.maker.module.topk_idx_t)
        to_rank, to_node, to_expert, in_rank, event = buffer.get_dispatch_layout(
            experts, len(manifest.counts), **queued
        )
        queued["previous_event"] = event
        inside = len(manifest.sent) <= NODE  # where the host need not wait to learn how many come
        arriving, _, self._keys, _, self._handle, event = buffer.dispatch(
            rows, topk_idx=experts, topk_weights=manifest.keys(), num_tokens_per_rank=to_rank,
            num_tokens_per_rdma_rank=to_node, is_token_in_rank=in_rank, num_tokens_per_expert=to_expert,
            num_worst_tokens=sum(manifest.received) if inside else 0, **queued,
        )
        return arriving, event

    def arranged(self) -> torch.Tensor | None:
        return arrangement(self._keys, self.manifest)


# Exchange of experts' rows by MORI (https://github.com/ROCm/mori), with AMD's GPUs.
#
# Each copy of a token is a token of its own with one expert, as with DeepEP (``experts.exchanges``). MORI works on the
# current stream, so nothing runs beside it. Its kernels are compiled when it is installed, or before a run with
# ``MORI_PRECOMPILE=1 python -c "import mori"`` (``kernels.jit_guard``).



class Mori:
    """Maker of transports; one MORI operator for each group of ranks and shape of rows."""

    def __init__(self, ops: Any, shmem: Any) -> None:
        self.ops, self.shmem = ops, shmem
        self._operators: dict[tuple[int, int, torch.dtype, int], Any] = {}

    def __call__(self, manifest: Manifest) -> MoriTransport:
        return MoriTransport(self, manifest)

    def operator(self, manifest: Manifest, width: int, dtype: torch.dtype) -> Any:
        """Return the operator for rows of this width and dtype. Collective when first asked for."""
        place = (id(manifest.group), width, dtype, manifest.most)
        found = self._operators.get(place)
        if found is None:
            if not self._operators:
                self.shmem.shmem_torch_process_group_init(manifest.group.group_name)
            ranks, kinds = len(manifest.sent), self.ops.EpDispatchCombineKernelType
            found = self._operators[place] = self.ops.EpDispatchCombineOp(self.ops.EpDispatchCombineConfig(
                data_type=dtype, rank=manifest.rank, world_size=ranks, hidden_dim=width, scale_dim=0, scale_type_size=1,
                max_token_type_size=dtype.itemsize, max_num_inp_token_per_rank=manifest.most,
                num_experts_per_rank=len(manifest.counts) // ranks, num_experts_per_token=1,
                kernel_type=kinds.IntraNode if ranks <= NODE else kinds.InterNodeV1, gpu_per_node=min(ranks, NODE),
            ))
        return found


class MoriTransport:
    """Rows of one forward pass of a layer (``RowTransport``)."""

    def __init__(self, maker: Mori, manifest: Manifest) -> None:
        self.maker, self.manifest = maker, manifest
        self._experts = manifest.expert_of_row().to(torch.int32)
        self._routing: Any = None
        self._keys = torch.empty(0)

    def start(self, rows: torch.Tensor, *, to_experts: bool) -> Arriving:
        operator = self.maker.operator(self.manifest, rows.shape[1], rows.dtype)
        count = sum(self.manifest.received if to_experts else self.manifest.sent)
        if not to_experts:
            found, _ = operator.combine(rows, None, self._experts, routing=self._routing)
        elif self._routing is None:
            found, keys, _, _, _, self._routing = operator.dispatch(
                rows, self.manifest.keys(), None, self._experts, return_routing=True
            )
            self._keys = keys[:count].clone()
        else:
            found = operator.dispatch(rows, None, None, self._experts, routing=self._routing)[0]
        arrived = found[:count].clone()  # the operator's own memory, which its next call overwrites
        return Arriving(arrived, lambda: arrived)

    def arranged(self) -> torch.Tensor | None:
        return arrangement(self._keys, self.manifest)
