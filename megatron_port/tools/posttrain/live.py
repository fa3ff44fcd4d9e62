"""Weights of a model that is in training, tensor by tensor, from whichever ranks hold their parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.record import BUFFER, WEIGHT, ParameterRecord, StatePiece, StateReader
from megatron_port.core.engine.api import Engine
from megatron_port.core.engine.module import read_local, recorded_parameters
from megatron_port.core.errors import CheckpointError
from megatron_port.core.train.hooks import Session
from megatron_port.run.build import with_shared_layers
from megatron_port.run.state import saved_records
from megatron_port.tools.inference.model import InferenceModel
from megatron_port.tools.interop.export_hf import exported_model, tensor_slabs
from megatron_port.tools.interop.hf_names import Tensor, hf_tensors

KINDS = (WEIGHT, BUFFER)


class LiveWeights:
    """The masters and buffers of an engine now. Collective: all ranks read the same slices in the same order.

    A read sums, over all ranks, what each owns of the slice, as bytes: every element is owned once, so nothing is
    rounded and no sign of a zero is lost. No rank holds more than the slice beside its own state.
    """

    def __init__(self, engine: Engine, session: Session) -> None:
        self.session = session
        self._pieces: dict[tuple[str, str], list[StatePiece]] = defaultdict(list)
        for piece in engine.state_pieces():
            if piece.kind in KINDS:
                self._pieces[piece.name, piece.kind].append(piece)
        self.dtype = next((p.tensor.dtype for rows in self._pieces.values() for p in rows), torch.float32)
        if session.cpu_group is not None:  # a rank may own nothing of the kind
            wide = torch.tensor(int(self.dtype == torch.float64))
            dist.all_reduce(wide, op=dist.ReduceOp.MAX, group=session.cpu_group)
            self.dtype = torch.float64 if wide else torch.float32

    def read(
        self, name: str, kind: str, offset: Sequence[int], shape: Sequence[int], *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a slice of a tensor, on the CPU; masters are float32 (float64 in float64 runs)."""
        found = np.zeros(tuple(shape), dtype=np.float64 if self.dtype == torch.float64 else np.float32)
        for piece in self._pieces.get((name, kind), ()):
            _put(found, offset, piece)
        result = torch.from_numpy(found)
        if self.session.cpu_group is not None and result.numel():
            dist.all_reduce(result.reshape(-1).view(torch.uint8), group=self.session.cpu_group)
        return result

    def named(self, names: Sequence[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor under its name in Hugging Face's format, whole, as :meth:`read` has it.

        ``names``: of those wanted; None: all.

        Raises:
            CheckpointError: no architecture there computes the model, or it has no tensor of one of the names.
        """
        for tensor in self.tensors(names):
            yield tensor.name, torch.cat(list(tensor_slabs(self, tensor))).reshape(tensor.shape)  # type: ignore[arg-type]

    def tensors(self, names: Sequence[str] | None = None) -> list[Tensor]:
        """Return which tensors there are; see :meth:`named`."""
        model, family = exported_model(self.session.config.model, lambda note: None)
        every = list(hf_tensors(model, family))
        unknown = set(names or ()) - {tensor.name for tensor in every}
        if unknown:
            raise CheckpointError(f"{family} has no tensor {sorted(unknown)[0]!r}; the first of its "
                                  f"{len(every)} is {every[0].name!r}")
        return [tensor for tensor in every if names is None or tensor.name in names]


def _put(out: np.ndarray, offset: Sequence[int], piece: StatePiece) -> None:
    """Write what a piece has of the box (``offset``, the shape of ``out``) into it."""
    low = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(offset, out.shape, piece.offset, piece.shape, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return
    target = out[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
    box = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece.offset, strict=True))
    length, count = math.prod(piece.shape), piece.tensor.numel()
    values = piece.tensor.detach().cpu().numpy().astype(out.dtype, copy=False)
    if count == length:
        target[...] = values.reshape(piece.shape)[box]
        return
    whole, owned = np.zeros(length, dtype=out.dtype), np.zeros(length, dtype=bool)
    whole[piece.flat_start : piece.flat_start + count] = values
    owned[piece.flat_start : piece.flat_start + count] = True
    np.copyto(target, whole.reshape(piece.shape)[box], where=owned.reshape(piece.shape)[box])


class LiveModel(InferenceModel):
    """A copy of a model in training that generates, on the same ranks, tp and pp; :meth:`refresh` takes the weights of
    now. Costs the weights of a stage once more."""

    def __init__(self, session: Session) -> None:
        # A rank's chunks are one stage here; the groups are over the same ranks.
        layout = replace(session.config.layout, virtual_pipeline_size=1, pipeline_schedule="1f1b",
                         pipeline_split=())
        config = replace(session.config, layout=layout)
        topology = replace(session.ctx.topology, vp=1, folded=False)
        ctx = replace(session.ctx, topology=with_shared_layers(config, topology))
        super().__init__(replace(session, config=config, ctx=ctx), _zeros)

    def refresh(self, engine: Engine, session: Session) -> None:
        """Take over the engine's weights. Collective over all ranks."""
        live = LiveWeights(engine, session)
        own: dict[tuple[str, str], list[tuple[ParameterRecord, torch.Tensor]]] = defaultdict(list)
        for record, parameter in recorded_parameters(self.stage):
            own[record.name, WEIGHT].append((record, parameter))
        for record, buffer in recorded_buffers(self.stage):
            own[record.name, BUFFER].append((record, buffer))
        for name, record in saved_records(session.config).items():
            kind = BUFFER if record.kind == BUFFER else WEIGHT
            whole = live.read(name, kind, (0,) * len(record.shape), record.shape)
            for here, tensor in own.get((name, kind), ()):
                read_local(_slice_of(whole), here, kind, tensor)


def _zeros(
    name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.zeros(shape)


def _slice_of(whole: torch.Tensor) -> StateReader:
    def read(
        name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    return read
