"""One import from start to end: the format, space on disk, reading, and the commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_port.core.checkpoint.shard import write_text
from megatron_port.core.checkpoint.slices import slabs
from megatron_port.core.config.dump import leaves, toml_value
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.logging import Advance, Tally, silent
from megatron_port.ext.corpora.hf_tokenizer import KEPT, copy_companions
from megatron_port.tools.interop.dcp import Imported, Stage, commit_import, is_dcp, read_dcp, scratch
from megatron_port.tools.interop.hf_check import check_import
from megatron_port.tools.interop.hf_files import HFFolder, is_hf
from megatron_port.tools.interop.megatron import megatron_folder, read_megatron
from megatron_port.tools.interop.universal import read_universal, universal_folder

# Import of a Hugging Face folder, and what stays beside it: tokenizer, generation settings, a model file.

MODEL_FILE = "model.toml"
SLAB_BYTES = 1 << 26


def read_hf(folder: HFFolder, stage: Stage, *, slab_bytes: int = SLAB_BYTES) -> Imported:
    """All weights, a slab at a time through ``stage``. Raises CheckpointError."""
    for name in folder.names():
        mapped, width = folder.mapping[name], folder.dtype(name).itemsize
        for offset, size in slabs(mapped.shape, max(1, slab_bytes // width)):
            stage.put(name, mapped.kind, mapped.shape, offset, folder.read(name, mapped.kind, offset, size))
    return Imported(model=folder.model, pieces=stage.pieces())


def keep_companions(source: Path, out: Path, model: ModelConfig) -> None:
    """Copy the small files of ``source`` to ``out/huggingface``; write ``out/model.toml``. Raises CheckpointError."""
    copy_companions(source, out / KEPT)
    write_text(out / MODEL_FILE, model_toml(model))


def model_toml(model: ModelConfig) -> str:
    """A file that a run can name in ``extends``."""
    lines = [f"{name} = {toml_value(value)}" for name, value in leaves(model)]
    return "\n".join(["[model]", *lines]) + "\n"


def find_format(source: Path) -> str:
    """Return ``dcp``, ``universal``, ``megatron-deepspeed`` or ``hf``. Raises CheckpointError if it is none of them."""
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory; give the folder of a checkpoint")
    if is_dcp(source):
        return "dcp"
    if universal_folder(source) is not None:
        return "universal"
    if megatron_folder(source) is not None:
        return "megatron-deepspeed"
    if is_hf(source):
        return "hf"
    raise CheckpointError(
        f"{source}: not a checkpoint that can be imported: no .metadata (torch.distributed.checkpoint), no zero/ or "
        "latest_universal (DeepSpeed Universal), no layer_*-model_states.pt or mp_rank_* or latest "
        "(Megatron-DeepSpeed), no config.json with a model_type (Hugging Face)"
    )


def import_checkpoint(
    source: Path, out: Path, *, form: str = "auto", model: ModelConfig | None = None, vocab_size: int = 0,
    trusted: bool = False, weights_only: bool = False, check: bool = True, note: Callable[[str], None] = print,
    advance: Advance = silent,
) -> Path:
    """Read ``source`` and commit ``out/step-N``; the committed folder.

    Tensors are on disk until the writer takes them: free space of twice the source is needed, and little memory.
    ``check``: compare a Hugging Face folder's logits with transformers', where it is installed. ``note`` gets that
    line, and one for each thing that is left out of the folder or read otherwise than it is written.
    ``advance`` is called with the bytes that were read, of formats that are read tensor by tensor (hf, dcp).

    Raises:
        CheckpointError: one message; nothing is left behind.
    """
    form = find_format(source) if form == "auto" else form
    size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    with scratch(out, 2 * size) as folder:
        stage = Stage(folder, put_down=Tally(advance, size).add)
        found = _read(source, folder, stage, form, model, vocab_size, trusted, weights_only, check, note)
        path = commit_import(found, out, source=source, weights_only=weights_only, note=note)
        if form == "hf":
            keep_companions(source, out, found.model)
        return path


def _read(
    source: Path, folder: Path, stage: Stage, form: str, model: ModelConfig | None, vocab_size: int, trusted: bool,
    weights_only: bool, check: bool, note: Callable[[str], None],
) -> Imported:
    if form == "hf":
        if model is not None:
            raise CheckpointError(f"{source}: --model is not for Hugging Face folders: config.json says what they hold")
        found = HFFolder(source)
        for line in found.notes:
            note(line)
        agreement = check_import(found, note) if check else None
        if agreement is not None:
            note(agreement.line())
        return read_hf(found, stage)
    if form == "dcp":
        if not is_dcp(source):
            raise CheckpointError(f"{source}: no .metadata in it; it is no torch.distributed.checkpoint folder")
        return read_dcp(source, stage, model)
    if form == "universal":
        place = universal_folder(source)
        if place is None:
            raise CheckpointError(f"{source}: no zero/ in it, and no latest_universal that names such a folder")
        return read_universal(place, model)
    place = megatron_folder(source)
    if place is None:
        raise CheckpointError(f"{source}: no layer_*-model_states.pt or mp_rank_*_model_states.pt in it")
    return read_megatron(
        place, folder, trusted=trusted, model=model, vocab_size=vocab_size, weights_only=weights_only, note=note
    )
