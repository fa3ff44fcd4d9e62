"""DeepSpeed Universal exports: what DeepSpeed's own code cuts out of them, and the way back."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from interop_cases import EXPERTS, GPT2, LLAMA, random_state, same, saved

from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.tools.interop.run_import import find_format, import_checkpoint
from megatron_port.tools.interop.universal import export_universal, megatron_names


class Pretender:
    """As much of a parameter under ZeRO as DeepSpeed's loader touches: the whole slice is one fragment."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = torch.Size(shape)
        self.fp32 = torch.zeros(self.shape.numel())
        address = types.SimpleNamespace(start=0, numel=self.shape.numel())
        self._hp_mapping = types.SimpleNamespace(
            lp_fragment_address=address, optim_fragment={}, get_hp_fragment=lambda: self.fp32
        )

    def numel(self) -> int:
        return self.shape.numel()


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("tp", [1, 2])
def test_deepspeeds_loader_reads_it(tmp_path: Path, model: ModelConfig, tp: int) -> None:
    """``load_hp_checkpoint_state`` of every tensor-parallel rank gives that rank's slice, padded as that rank pads."""
    loader = pytest.importorskip("deepspeed.checkpoint.universal_checkpoint", exc_type=ImportError)
    out = export_universal(saved(tmp_path / "ours", model), tmp_path / "universal")
    tag = (out / "latest_universal").read_text()
    truth, padded = random_state(model), 64
    for ours, foreign in megatron_names(model).items():
        parts = []
        for rank in range(tp):
            p = Pretender(foreign.local_shape(tp, padded))
            step = loader.load_hp_checkpoint_state(p, str(out / tag / "zero" / foreign.name), rank, tp)
            assert int(step) == 11
            parts.append({"weight": p.fp32, **p._hp_mapping.optim_fragment})
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            shape = foreign.local_shape(tp, padded)
            slices = [part[kind].view(shape) for part in parts]
            if foreign.cat_dim is None:
                whole = slices[0]
                assert all(torch.equal(whole, s) for s in slices)
            elif foreign.parts == 2:
                whole = torch.cat([torch.cat([s.chunk(2)[i] for s in slices]) for i in (0, 1)])
            else:
                whole = torch.cat(slices, dim=foreign.cat_dim)
            if foreign.vocabulary:
                assert not whole[model.vocab_size :].any()
                whole = whole[: model.vocab_size]
            assert torch.equal(whole.reshape(-1), truth[ours, kind].reshape(-1)), (ours, kind)


@pytest.mark.parametrize(
    ("model", "names"), [(GPT2, "megatron"), (LLAMA, "megatron"), (GPT2, "canonical"), (EXPERTS, "canonical")],
    ids=["gpt2 megatron", "llama megatron", "gpt2 canonical", "experts canonical"],
)
def test_it_comes_back(tmp_path: Path, model: ModelConfig, names: str) -> None:
    checkpoint = saved(tmp_path / "ours", model)
    out = export_universal(checkpoint, tmp_path / "universal", names=names)
    assert find_format(out) == "universal"
    back = open_checkpoint(import_checkpoint(out, tmp_path / "back"))
    same(checkpoint, back)
    assert back.scalars == checkpoint.scalars and back.step == checkpoint.step
    # Without our sidecar, as DeepSpeed's own converter leaves it: the model must be told.
    folder = out / "global_step12"
    (folder / "megatron_port.json").unlink()
    with pytest.raises(CheckpointError, match="--model FILE.toml"):
        import_checkpoint(out, tmp_path / "again")
    back = open_checkpoint(import_checkpoint(folder, tmp_path / "again", model=model))
    same(checkpoint, back)
    assert back.scalars == {"optimizer_steps": 11} and back.manifest.state.samples == 96


def test_files_are_plain(tmp_path: Path) -> None:
    """No classes in any file, and names are exactly Megatron-DeepSpeed's."""
    out = export_universal(saved(tmp_path / "ours", LLAMA), tmp_path / "universal")
    files = list(out.rglob("*.pt"))
    for path in files:
        torch.load(path, weights_only=True)
        assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []
    found = {p.name for p in (out / "global_step12" / "zero").iterdir() if p.is_dir()}
    layer = {"input_layernorm.weight", "self_attention.query_key_value.weight", "self_attention.dense.weight",
             "post_attention_layernorm.weight", "mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight"}
    assert found == {f"{i}.{n}" for i in (2, 3) for n in layer} | {
        "1.word_embeddings.weight", "4.weight", "5.lm_head.weight"
    }


def _pad(folder: Path) -> None:
    path = folder / "zero" / "tied_modules.embed.word_embeddings.weight" / "fp32.pt"
    entry = torch.load(path, weights_only=True)
    entry["param"] = torch.nn.functional.pad(entry["param"], (0, 0, 0, 11))
    torch.save(entry, path)


def test_padding_is_cut(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "ours", GPT2)
    out = export_universal(checkpoint, tmp_path / "universal")
    _pad(out / "global_step12")
    same(checkpoint, open_checkpoint(import_checkpoint(out, tmp_path / "back")))


class NotPlain:
    """A class that a reader would have to import."""


def test_refusals(tmp_path: Path) -> None:
    bare = saved(tmp_path / "bare", GPT2, kinds=("weight",))
    with pytest.raises(CheckpointError, match="no exp_avg or exp_avg_sq"):
        export_universal(bare, tmp_path / "x")
    checkpoint = saved(tmp_path / "ours", GPT2)

    def harmed(number: int, file: str, value: Any) -> Path:
        out = export_universal(checkpoint, tmp_path / f"u{number}")
        path = out / "global_step12" / "zero" / "3.mlp.dense_4h_to_h.bias" / file
        if value is None:
            path.unlink()
        else:
            torch.save(value, path)
        return out

    cases = [
        ("fp32.pt", {"param": torch.zeros(33)}, r"shape \(33,\).*\(32,\)"),
        ("fp32.pt", {"tensor": torch.zeros(32)}, 'no tensor called "param"'),
        ("fp32.pt", NotPlain(), "objects and not only tensors"),
        ("fp32.pt", None, "layers.1.mlp.down.bias.*not in the source"),
        ("exp_avg.pt", None, "exp_avg of layers.1.mlp.down.bias: not in the source; with --weights-only"),
        ("step.pt", torch.tensor(4), "different numbers of steps"),
    ]
    for number, (file, value, message) in enumerate(cases):
        with pytest.raises(CheckpointError, match=message):
            import_checkpoint(harmed(number, file, value), tmp_path / "back")
    with pytest.raises(CheckpointError, match="not a checkpoint that can be imported"):
        import_checkpoint(tmp_path, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(CheckpointError, match=r"mlp.router.* no such parameter; .* --names canonical"):
        export_universal(saved(tmp_path / "experts", EXPERTS), tmp_path / "x")
