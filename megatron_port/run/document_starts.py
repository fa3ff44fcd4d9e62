"""Whether documents of a run's corpora begin as the model expects that it starts from: with its tokenizer's BOS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_port.core.data.indexed import BOS_OMITTED, bos_ids, meta_path, read_meta
from megatron_port.core.errors import DataError
from megatron_port.ext.corpora.pinned import Trained, tokenizer_in
from megatron_port.ext.corpora.tokenizer import added_ids


def check_document_starts(prefixes: Sequence[str], folder: Path | None, trained: Trained | None) -> None:
    """Check the corpora of a run against the weights that it starts from.

    Not compared: conversations, whose template decides; corpora of ``--no-bos``; those of other programs.

    Args:
        prefixes: of the corpora; those in a store are left out.
        folder: with the model's tokenizer.
        trained: the tokenizer that a checkpoint of ours records.

    Raises:
        DataError: documents begin otherwise than texts by the model's tokenizer do.
    """
    wanted = _begins(folder, trained)
    for prefix in prefixes if wanted is not None else ():
        meta = read_meta(prefix) if "://" not in prefix else None
        if meta is None or meta.bos == BOS_OMITTED or not meta.tokenizer.startswith(("hf:", "sentencepiece:")):
            continue
        found = () if meta.chat else bos_ids(meta.bos)
        if not meta.chat and found is not None and found != wanted:
            old = "" if meta.bos else " (it was prepared before `data prepare` added BOS)"
            # To prepare terabytes again only to have this in the sidecar would be in vain.
            kept = "" if found else (
                f'. To train without BOS on purpose, add --no-bos, or write "bos": "{BOS_OMITTED}" into this file')
            raise DataError(
                f"{meta_path(prefix)}: documents begin with {_shown(found)}{old}, and the tokenizer of the model that "
                f"this run starts from begins a text with {_shown(wanted)}; prepare the corpus again with that "
                f"tokenizer{kept}"
            )


def _begins(folder: Path | None, trained: Trained | None) -> tuple[int, ...] | None:
    """Return the ids that a text begins with; None: not known."""
    try:
        if trained is not None and trained.name:
            return bos_ids(trained.bos) if trained.bos else None
        return added_ids(tokenizer_in(folder)).before if folder is not None else None
    except (DataError, ValueError):  # no tokenizer that can be read
        return None


def _shown(ids: tuple[int, ...] | None) -> str:
    return " ".join(map(str, ids)) if ids else "no BOS"
