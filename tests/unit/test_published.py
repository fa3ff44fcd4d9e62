"""Published configurations are imported with every field that they have, and give transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_models as hf
import pytest
import torch
from published_configs import PUBLISHED, REFUSED, cut

from megatron_port.core.errors import CheckpointError
from megatron_port.tools.interop.hf_check import our_logits
from megatron_port.tools.interop.hf_config import model_from_hf
from megatron_port.tools.interop.hf_files import HFFolder

transformers = pytest.importorskip("transformers")
BOUND = {"deepseek_v2": 1e-6}  # it turns its heads in complex64


def written(config: dict[str, Any], folder: Path) -> Path:
    """A random model of a configuration, and the configuration beside it as it is."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    hf.reference(read).save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def apart(folder: HFFolder, length: int = 48) -> float:
    """max|Δ| ÷ max|logit| in fp64 against transformers' own loader."""
    tokens = torch.randint(0, folder.model.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))
    model = hf.loaded(folder.path).double()
    with torch.no_grad(), hf.in_double(model):
        theirs = model(tokens, use_cache=False).logits
    return hf.relative(our_logits(folder.read, folder.model, tokens, dtype=torch.float64), theirs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    folder = HFFolder(written(cut(PUBLISHED[name]), tmp_path / "model"))
    unread = {"is_llama_config", "use_mrope", "predict_special_tokens", "sliding_window_size", "use_qk_norm"}
    said = " ".join(folder.notes)
    assert all(field in said for field in unread & PUBLISHED[name].keys()), folder.notes
    assert apart(folder) <= BOUND.get(folder.family, 1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_with_what_to_do(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        model_from_hf(config, "config.json")
