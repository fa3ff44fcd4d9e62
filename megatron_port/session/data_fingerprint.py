"""Check that a resumed run trains on the same tokens: its corpora and tokenizer against its checkpoint's."""

from __future__ import annotations

from megatron_port.checkpoint.reader import Checkpoint
from megatron_port.config.schema import RunConfig
from megatron_port.data.fingerprint import changes
from megatron_port.data.loader import Loaders
from megatron_port.errors import DataError


def check_data_fingerprint(checkpoint: Checkpoint, config: RunConfig, loaders: Loaders) -> list[str]:
    """Return a line for each difference, where differences are allowed: ``data.pinned`` is false, or
    ``checkpoint.resume`` names a checkpoint, so that this may be another run on other data. All ranks return the same.

    Raises:
        DataError: the data of this run has changed since its checkpoint.
    """
    state = checkpoint.manifest.state
    saved = state.data.get("corpora", []) if isinstance(state.data, dict) else []
    found = changes(saved if isinstance(saved, list) else [], loaders.data_fingerprint)
    before, now = str((state.tokenizer or {}).get("hash", "")), str(loaders.tokenizer.get("hash", ""))
    if before and now and before != now and not found:
        found.append(f"the tokenizer was {state.tokenizer.get('name')} ({before[:12]}), is "
                     f"{loaders.tokenizer.get('name')} ({now[:12]})")
    if not found:
        return []
    if config.data.pinned and config.checkpoint.resume == "auto":
        raise DataError(
            f"{checkpoint.path.name} was trained on other data under the same name: {'; '.join(found)}. Put the old "
            "files back, continue with the new ones by data.pinned = false, or start another run from it with "
            "checkpoint.resume = PATH and another name"
        )
    return [f"note: other data than when {checkpoint.path.name} was saved: {line}" for line in found]
