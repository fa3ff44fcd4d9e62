"""Export to a Hugging Face folder: sharded safetensors, config, tokenizer, generation settings, a model card.

Weights pass through a slab at a time. Before the folder gets its name, both models are run on the same tokens, ours
from the checkpoint and transformers' from the new files; above tolerance nothing is left (``hf_check``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.checkpoint.shard import write_chunks, write_text
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.dist.record import BUFFER
from megatron_port.core.errors import CheckpointError, DataError
from megatron_port.core.io.logging import Advance, Tally, silent
from megatron_port.ext.corpora.hf_tokenizer import (
    begin_of_text,
    check_written,
    end_of_text,
    kept_files,
    make_paddable,
    write_tokenizer,
)
from megatron_port.ext.corpora.pinned import (
    PinnedChat,
    Trained,
    pinned_chat,
    trained_with,
    write_chat,
    write_generation,
)
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.run.saved_model import model_of
from megatron_port.tools.interop.dcp import building
from megatron_port.tools.interop.hf_check import Agreement, check_export
from megatron_port.tools.interop.hf_config import family_for, hf_config
from megatron_port.tools.interop.hf_files import DTYPES, INDEX, SINGLE
from megatron_port.tools.interop.hf_names import Mapped, Run, Tensor, hf_tensors
from megatron_port.tools.interop.run_import import SLAB_BYTES

SHARD_BYTES = 5_000_000_000
CODES = {dtype: code for code, dtype in DTYPES.items()}
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class _Shard:
    name: str
    tensors: tuple[Tensor, ...]


def export_hf(
    checkpoint: Checkpoint, out: Path, *, dtype: str = "", tokenizer: Path | None = None, weights_only: bool = False,
    shard_bytes: int = SHARD_BYTES, check: bool = True, note: Callable[[str], None] = print, advance: Advance = silent,
) -> Agreement | None:
    """Write ``checkpoint`` to the new folder ``out``; how far the two models' logits are apart (None: not checked).

    Args:
        dtype: ``float32`` | ``bfloat16`` | ``float16`` | ``float64``; empty: as saved (masters are float32).
        tokenizer: a folder with the files of the tokenizer trained with; None: the pinned file, or what the
            checkpoint was imported with.
        weights_only: write no tokenizer.
        advance: called with the bytes of weights that are written.

    Raises:
        DataError: the tokenizer trained with is not to be had, or ``tokenizer`` is another.
        CheckpointError: no architecture computes the model, the source is damaged, ``out`` exists, the disk refuses,
            or the logits are further apart than rounding explains.
        EnvironmentFault: transformers is not installed.
    """
    model, family = exported_model(model_of(checkpoint.manifest.state.config, str(checkpoint.path)), note)
    kind = _dtype(checkpoint, dtype)
    tensors = list(hf_tensors(model, family))
    total = sum(_bytes(t, kind) for t in tensors)
    shards = _shards(tensors, kind, shard_bytes)
    kept = kept_files(checkpoint)
    chat: PinnedChat | None = None
    with building(out, total) as part:
        tokens_of = "left out (`--no-tokenizer`)"
        if not weights_only:
            tokens_of = write_tokenizer(part, checkpoint, asked=tokenizer, kept=kept, note=note)
            chat = _chat(part, trained_with(checkpoint), tokenizer, note)
        eos, bos, pad = end_of_text(checkpoint, kept), begin_of_text(part, checkpoint, kept), make_paddable(part)
        if eos is not None and eos >= model.vocab_size:
            note(f"the tokenizer's end of text {eos} is beyond the model's {model.vocab_size} entries; left out")
            eos = None
        bos, pad = (i if i is not None and i < model.vocab_size else None for i in (bos, pad))
        written = Tally(advance, total).add
        for shard in shards:
            _write_shard(part / shard.name, shard, checkpoint, kind, written)
        _write_json(part / "config.json", hf_config(model, dtype=str(kind).rpartition(".")[2], eos=eos, bos=bos))
        ends = (-1 if eos is None else eos, trained_with(checkpoint).eod_id, *(chat.stop_ids if chat else ()))
        write_generation(part, kept, [i for i in ends if 0 <= i < model.vocab_size], bos=bos, pad=pad)
        if len(shards) > 1:
            table = {t.name: s.name for s in shards for t in s.tensors}
            _write_json(part / INDEX, {"metadata": {"total_size": total}, "weight_map": table})
        agreement = check_export(checkpoint, model, part, dtype=kind) if check else None
        read_by = check_written(part, checkpoint, chat) if check and not weights_only else ""
        write_text(part / "README.md", _card(checkpoint, model, family, kind, agreement, tokens_of, read_by))
    if agreement is not None:
        note(agreement.line())
    return agreement


def exported_model(model: ModelConfig, note: Callable[[str], None]) -> tuple[ModelConfig, str]:
    """Return the model that is written and its family; what predicts further tokens in training is left out where no
    family has it. Raises CheckpointError: no architecture computes the model."""
    try:
        return model, family_for(model)
    except CheckpointError:
        if not model.mtp_layers:
            raise
    alone = replace(model, mtp_layers=0)
    family = family_for(alone)
    note(f"{family} has no multi-token prediction: mtp_layers {model.mtp_layers} is left out, which only training uses")
    return alone, family


def _chat(part: Path, trained: Trained, asked: Path | None, note: Callable[[str], None]) -> PinnedChat | None:
    """Write the chat template trained with; None: there was none, or ``asked`` has its own."""
    try:
        chat = pinned_chat(trained)
    except DataError as error:
        if asked is None:
            raise
        note(f"chat template of {asked}, not compared: {error}")
        return None
    if chat is not None:
        write_chat(part, chat)
    return chat


def _dtype(checkpoint: Checkpoint, asked: str) -> torch.dtype:
    if asked:
        if asked not in NAMES:
            raise CheckpointError(f"--dtype {asked}: use {', '.join(NAMES)}")
        return NAMES[asked]
    return checkpoint.dtype(next(iter(checkpoint.names())))


def _stored(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if tensor.mapped.kind == BUFFER else dtype


def _bytes(tensor: Tensor, dtype: torch.dtype) -> int:
    return prod(tensor.shape) * _stored(tensor, dtype).itemsize


def _shards(tensors: list[Tensor], dtype: torch.dtype, limit: int) -> list[_Shard]:
    """Files of at most ``limit`` bytes (or one tensor), in order."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        need = _bytes(tensor, dtype)
        if groups[-1] and size + need > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += need
    if len(groups) == 1:
        return [_Shard(SINGLE, tuple(groups[0]))]
    count = len(groups)
    return [_Shard(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(g)) for i, g in enumerate(groups, 1)]


def _write_shard(
    path: Path, shard: _Shard, checkpoint: Checkpoint, dtype: torch.dtype, written: Callable[[int], None]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in shard.tensors:
        end = position + _bytes(tensor, dtype)
        header[tensor.name] = {
            "dtype": CODES[_stored(tensor, dtype)], "shape": list(tensor.shape), "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def chunks() -> Iterator[memoryview | bytes]:
        yield head
        for tensor in shard.tensors:
            for slab in tensor_slabs(checkpoint, tensor):
                data = slab.to(_stored(tensor, dtype)).contiguous()
                yield data.view(-1).view(torch.uint8).numpy().data
                written(data.nbytes)

    write_chunks(path, len(head) + position, chunks())


def tensor_slabs(
    checkpoint: Checkpoint, tensor: Tensor, *, slab_bytes: int = SLAB_BYTES
) -> Iterator[torch.Tensor]:
    """The rows of a tensor there, in order, in slabs of about ``slab_bytes``, in the dtype of the checkpoint."""
    columns = tensor.mapped.columns
    if tensor.pieces[0][1].expert is not None:
        yield from _experts(checkpoint, tensor)
        return
    if columns is None:
        yield torch.cat([_box(checkpoint, mapped, run, 0, run.count, (0, 0)) for mapped, run in tensor.pieces])
        return
    if tensor.mapped.transposed:
        rows, width = tensor.shape
        step = max(1, slab_bytes // (8 * width))
        for start in range(0, rows, step):
            some = (start, min(step, rows - start))
            yield torch.cat([_box(checkpoint, mapped, run, 0, run.count, some) for mapped, run in tensor.pieces]).t()
        return
    step = max(1, slab_bytes // (8 * columns))
    for mapped, run in tensor.pieces:
        for start in range(0, run.count, step):
            yield _box(checkpoint, mapped, run, start, min(step, run.count - start), (0, columns))


def _experts(checkpoint: Checkpoint, tensor: Tensor) -> Iterator[torch.Tensor]:
    """A tensor of all experts there, one of them at a time, [1, ...]: the rows of its matrices alternate, or follow one
    another."""
    columns = tensor.mapped.columns
    for _, pieces in groupby(tensor.pieces, key=lambda piece: piece[1].expert):
        found = [(run.step, _box(checkpoint, mapped, run, 0, run.count, (0, columns or 0))) for mapped, run in pieces]
        parts = [rows for _, rows in found]
        rows = torch.cat(parts) if found[0][0] == 1 else torch.stack(parts, dim=1).flatten(0, 1)
        yield (rows.t() if tensor.mapped.transposed else rows)[None]


def _box(
    checkpoint: Checkpoint, mapped: Mapped, run: Run, start: int, count: int, columns: tuple[int, int]
) -> torch.Tensor:
    """Return ``count`` rows of ours from ``run.ours + start``, columns (first, count) of them; [count(, columns)]."""
    shape, first = mapped.shape, run.ours + start
    tail = () if mapped.columns is None else (columns,)
    offset, size = tuple(c[0] for c in tail), tuple(c[1] for c in tail)
    at: list[int] = []
    for length in reversed(shape[1 : len(shape) - len(tail)]):
        first, row = divmod(first, length)  # a run never leaves its half, nor its expert
        at.insert(0, row)
    lead = (1,) * len(at)
    return checkpoint.read(mapped.name, mapped.kind, (first, *at, *offset), (*lead, count, *size)).view(count, *size)


def _write_json(path: Path, body: dict[str, Any]) -> None:
    write_text(path, json.dumps(body, indent=2) + "\n")


def _card(
    checkpoint: Checkpoint, model: ModelConfig, family: str, dtype: torch.dtype, agreement: Agreement | None,
    tokenizer: str, read_by: str,
) -> str:
    state = checkpoint.manifest.state
    run = state.config.get("name", "") if isinstance(state.config, dict) else ""
    rows = [
        ("architecture", family), ("parameters", f"{parameter_count(model):,}"), ("layers", model.num_layers),
        ("hidden size", model.hidden_size), ("heads (key/value)", f"{model.num_attention_heads} ({model.kv_heads})"),
        ("vocabulary", f"{model.vocab_size:,}"), ("context", model.seq_length),
        ("weights", str(dtype).rpartition(".")[2]), ("tokenizer", tokenizer), ("run", run or "unknown"),
        ("steps", state.step), ("tokens seen in training", f"{state.tokens:,}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    said = agreement.card() if agreement is not None else (
        "The export was **not checked** against transformers (`--skip-check`)."
    )
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# {model.name}\n\n"
        f"Exported by megatron_port from `{checkpoint.path.name}`.\n\n| | |\n|---|---|\n{table}\n\n"
        f"## Agreement with the trained model\n\n{said}\n" + (f"\n{read_by}\n" if read_by else "")
    )
