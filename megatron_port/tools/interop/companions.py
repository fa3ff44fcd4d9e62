"""Small files that come with a model: tokenizer, chat template, generation settings."""

from __future__ import annotations

from pathlib import Path

from megatron_port.core.errors import CheckpointError
from megatron_port.core.io.files import outside_target, write_bytes

KEPT = "huggingface"
"""Folder beside the imported checkpoint with the small files of the source."""
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)
TOKENIZER_FILES = COMPANIONS[2:]
_MAX_COMPANION = 1 << 28


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
