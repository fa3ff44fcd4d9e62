"""Import of a Hugging Face folder, and what stays beside it: tokenizer, generation settings, a model file."""

from __future__ import annotations

from pathlib import Path

from megatron_port.core.checkpoint.disk import write_text
from megatron_port.core.checkpoint.slices import slabs
from megatron_port.core.config.dump import leaves, toml_value
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.atomic import write_bytes
from megatron_port.core.io.links import outside_target
from megatron_port.tools.interop.commit import Imported
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.interop.staged import Stage

KEPT = "huggingface"
"""Folder beside the imported checkpoint with the small files of the source."""
MODEL_FILE = "model.toml"
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)
TOKENIZER_FILES = COMPANIONS[2:]
SLAB_BYTES = 1 << 26
_MAX_COMPANION = 1 << 28


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


def copy_companions(source: Path, kept: Path) -> None:
    """Copy tokenizer, chat template, generation settings and ``config.json`` to ``kept``.

    Raises CheckpointError: one is too large, or a link out of the folder.
    """
    for path in (source / name for name in COMPANIONS):
        if not path.is_file():
            continue
        target = outside_target(path)
        if target is not None:
            raise CheckpointError(f"{path} is a link to {target}, outside of its folder, and would be copied with the "
                                  "model; put a copy in its place if it belongs there")
        kept.mkdir(parents=True, exist_ok=True)
        if path.stat().st_size > _MAX_COMPANION:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes; such a file has at most {_MAX_COMPANION}")
        write_bytes(kept / path.name, path.read_bytes())


def model_toml(model: ModelConfig) -> str:
    """A file that a run can name in ``extends``."""
    lines = [f"{name} = {toml_value(value)}" for name, value in leaves(model)]
    return "\n".join(["[model]", *lines]) + "\n"
