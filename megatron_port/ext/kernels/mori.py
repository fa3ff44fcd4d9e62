"""Exchange of experts' rows by MORI (https://github.com/ROCm/mori), with AMD's GPUs.

Each copy of a token is a token of its own with one expert, as with DeepEP (``kernels.deepep``). MORI works on the
current stream, so nothing runs beside it. Its kernels are compiled when it is installed, or before a run with
``MORI_PRECOMPILE=1 python -c "import mori"`` (``kernels.compile_entry_points``).
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_port.ext.kernels.row_exchange import Arriving, Manifest, arrangement

NODE = 8
"""GPUs of a node."""


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
