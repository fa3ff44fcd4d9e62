"""Exchange of experts' rows by DeepEP (https://github.com/deepseek-ai/DeepEP).

Its ``Buffer`` is used, whose kernels are compiled when the package is built; ``ElasticBuffer`` compiles at run time,
which is not allowed here. DeepEP sends a token once to each rank and adds its experts' results up in bfloat16. Here
each copy is a token of its own with one expert: more bytes, and the bits of torch's exchange on any layout.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_port.ext.kernels.row_exchange import Arriving, Manifest, arrangement

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
