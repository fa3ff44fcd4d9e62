"""Hugging Face folders in and out: one mapping in both directions, slab by slab, nothing trusted, nothing half done."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import hf_models as hf
import pytest
import torch
from interop_cases import read_all, saved
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_port.cli.main import main
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError, DamagedCheckpoint
from megatron_port.ext.corpora.tokenizer import HFTokenizer
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.run.same_model import model_differences
from megatron_port.run.weights import open_weights
from megatron_port.tools.interop import export_hf as export_module
from megatron_port.tools.interop.dcp import Shape, Stage
from megatron_port.tools.interop.export_hf import export_hf, tensor_slabs
from megatron_port.tools.interop.hf_config import family_for, hf_config, model_from_hf
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.interop.hf_names import hf_mapping, hf_tensors
from megatron_port.tools.interop.run_import import import_checkpoint, read_hf

transformers = pytest.importorskip("transformers")

GPT2, NEOX, LLAMA = "gpt2", "gpt_neox", "llama"
OURS = {
    GPT2: ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=53, seq_length=16),
    NEOX: ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=53, seq_length=16,
                      rotary_percent=0.25, position_embedding="rope", parallel_residual=True, tie_embeddings=False),
    LLAMA: ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
                       vocab_size=53, seq_length=16, position_embedding="rope", normalization="rmsnorm",
                       activation="swiglu", add_bias=False, tie_embeddings=False, rope_scaling="llama3",
                       rope_factor=4.0, rope_original_length=8),
}


def quiet(_: str) -> None:
    """No notes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sharded folder of each family, written by transformers."""
    out = {}
    for family, config in ((GPT2, hf.gpt2()), (NEOX, hf.neox()), (LLAMA, hf.llama())):
        out[family] = hf.saved(hf.reference(config, scale=1.0), tmp_path_factory.mktemp(family) / "model", shard="40KB")
        assert len(list(out[family].glob("*.safetensors"))) > 3
    return out


@pytest.fixture(params=[GPT2, NEOX, LLAMA])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def copied(source: Path, to: Path) -> Path:
    shutil.copytree(source, to)
    return to


def test_rows_are_mapped_one_to_one(family: str) -> None:
    """Runs tile our rows and theirs exactly, so neither direction loses or doubles an element."""
    model = OURS[family]
    assert family_for(model) == family
    for name, mapped in hf_mapping(model, family).items():
        assert mapped.runs[0].ours == 0 and sum(r.count for r in mapped.runs) == mapped.rows, name
        assert all(a.ours + a.count == b.ours for a, b in pairwise(mapped.runs)), name
    tensors = list(hf_tensors(model, family))
    assert len({t.name for t in tensors}) == len(tensors)
    for tensor in tensors:
        runs = [run for _, run in tensor.pieces]
        assert runs[0].theirs == 0
        assert all(a.theirs + a.count == b.theirs for a, b in pairwise(runs)), tensor.name
    total = sum(prod(m.shape) for m in hf_mapping(model, family).values())
    assert sum(prod(t.shape) for t in tensors) == total


def test_any_box_is_a_slice_of_the_whole(family: str, folders: dict[str, Path]) -> None:
    folder = HFFolder(folders[family])
    generator = torch.Generator().manual_seed(2)
    for name, mapped in folder.mapping.items():
        whole = folder.read(name, "weight", (0,) * len(mapped.shape), mapped.shape)
        assert whole.shape == mapped.shape
        for _ in range(4):
            offset = tuple(int(torch.randint(0, n, (), generator=generator)) for n in mapped.shape)
            size = tuple(
                int(torch.randint(0, n - o + 1, (), generator=generator)) for n, o in zip(mapped.shape, offset)
            )
            box = tuple(slice(o, o + n) for o, n in zip(offset, size))
            assert torch.equal(folder.read(name, "weight", offset, size), whole[box]), (name, offset, size)
    with pytest.raises(CheckpointError, match="another model"):
        folder.read("embedding.word.weight", "weight", (0, 0), (102, 64))
    with pytest.raises(CheckpointError, match="exp_avg of"):
        folder.read("embedding.word.weight", "exp_avg", (0, 0), (1, 1))


def test_there_and_back_is_equal_to_the_bit(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """HF → ours → HF: every tensor; and transformers' logits of both, through its own loader."""
    path = import_checkpoint(folders[family], tmp_path / "ours", note=quiet)
    assert open_weights(tmp_path / "ours").path == path
    checkpoint = open_checkpoint(path)
    found = export_hf(checkpoint, tmp_path / "back", shard_bytes=40_000, note=quiet)
    assert found is not None and found.deviation <= found.tolerance <= 1.4e-6 and found.scale >= 2.0
    back, source = HFFolder(tmp_path / "back"), HFFolder(folders[family])
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3
    for tensor in hf_tensors(source.model, family):
        one, two = source.tensor(tensor.name), back.tensor(tensor.name)
        assert one is not None and two is not None and torch.equal(one, two), tensor.name
    assert not model_differences(source.model, back.model)
    card = (tmp_path / "back" / "README.md").read_text()
    assert f"**{found.deviation:.2e}**" in card and "weights × " in card
    tokens = torch.arange(60).view(2, 30)
    with torch.no_grad():
        assert torch.equal(hf.loaded(tmp_path / "back")(tokens).logits, hf.loaded(folders[family])(tokens).logits)


def test_our_config_is_what_transformers_reads(family: str, tmp_path: Path) -> None:
    """``config.json`` written for a model of ours, read by transformers, written by it, read by us: the same model."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(OURS[family], dtype="float32", eos=5)))
    config = transformers.AutoConfig.from_pretrained(str(tmp_path), local_files_only=True)
    config.save_pretrained(str(tmp_path / "again"))
    body = json.loads((tmp_path / "again" / "config.json").read_text())
    assert not model_differences(model_from_hf(body, "again"), OURS[family]) and config.eos_token_id == 5


def test_slabs_stay_small(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Neither direction ever asks for more than a slab: memory does not grow with the model."""
    sizes = []

    class Watched(Stage):
        def put(self, name: str, kind: str, global_shape: Shape, offset: Shape, tensor: torch.Tensor) -> None:
            sizes.append(tensor.numel() * tensor.element_size())
            super().put(name, kind, global_shape, offset, tensor)

    (tmp_path / "stage").mkdir()
    read_hf(HFFolder(folders[family]), Watched(tmp_path / "stage"), slab_bytes=4096)
    assert max(sizes) <= 4096 and sum(sizes) == 4 * parameter_count(HFFolder(folders[family]).model)
    checkpoint = open_checkpoint(import_checkpoint(folders[family], tmp_path / "ours", note=quiet))
    source = HFFolder(folders[family])
    for tensor in hf_tensors(source.model, family):
        slabs = list(tensor_slabs(checkpoint, tensor, slab_bytes=4096))
        if tensor.mapped.columns is not None:
            assert max(s.numel() for s in slabs) <= 4096 // 8 and len(slabs) > 1, tensor.name
        whole = source.tensor(tensor.name)
        assert whole is not None and torch.equal(torch.cat(slabs), whole), tensor.name


def test_a_wrong_export_is_refused_and_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(import_checkpoint(folders[GPT2], tmp_path / "ours", note=quiet))

    def wrong(model: ModelConfig, **options: Any) -> dict[str, Any]:
        return {**hf_config(model, **options), "activation_function": "gelu"}

    monkeypatch.setattr(export_module, "hf_config", wrong)
    with pytest.raises(CheckpointError, match=r"differ from ours by .* above 1\.[0-4]e-06"):
        export_hf(checkpoint, tmp_path / "out", note=quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]


def test_half_precision_and_a_model_without_a_counterpart(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "ours", OURS[LLAMA], ("weight",))
    found = export_hf(checkpoint, tmp_path / "half", dtype="bfloat16", note=quiet)
    assert found is not None and found.deviation <= found.tolerance
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["model.norm.weight"], read_all(checkpoint)["final_norm.weight"].bfloat16())
    odd = replace(OURS[GPT2], normalization="rmsnorm")
    with pytest.raises(CheckpointError, match="gpt2 needs normalization = layernorm"):
        family_for(odd)


def test_pickles_are_refused_with_the_way_out(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    shutil.copy(folders[GPT2] / "config.json", tmp_path / "old")
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pickles \(pytorch_model.bin\).*save_pretrained"):
        HFFolder(tmp_path / "old")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"attention_bias": True}, "biases everywhere or nowhere"),
        ({"hidden_act": "relu"}, "only silu"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"vocab_size": 103}, r"model.embed_tokens.weight has shape \(101, 64\); config.json makes it \(103, 64\)"),
        ({"num_hidden_layers": 2}, r"layers.2.* is no parameter"),
        ({"num_hidden_layers": 4}, r"layers.3.* is not in its files"),
        ({"hidden_size": "64"}, "expected int"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    change: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = copied(folders[LLAMA], tmp_path / "x")
    body = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**body, **change}))
    with pytest.raises(CheckpointError, match=message):
        HFFolder(folder)


def test_damage_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders[GPT2], tmp_path / "cut")
    shard = sorted(folder.glob("model-*"))[0]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DamagedCheckpoint, match=shard.name):
        HFFolder(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        HFFolder(folder)
    folder = copied(folders[GPT2], tmp_path / "path")
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    first = next(iter(body["weight_map"]))
    body["weight_map"][first] = "../../secret.safetensors"
    index.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="not allowed"):
        HFFolder(folder)


def test_names_without_prefix_and_old_buffers(folders: dict[str, Path], tmp_path: Path) -> None:
    """Files of the bare model, as the first GPT-2 uploads are: no prefix, causal masks among the weights."""
    whole = {}
    for file in folders[GPT2].glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            whole |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    bare = {name.removeprefix("transformer."): t.contiguous() for name, t in whole.items() if name != "lm_head.weight"}
    (tmp_path / "bare").mkdir()
    shutil.copy(folders[GPT2] / "config.json", tmp_path / "bare")
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 32, 32)}, tmp_path / "bare" / "model.safetensors")
    one, two = HFFolder(tmp_path / "bare"), HFFolder(folders[GPT2])
    for name, mapped in two.mapping.items():
        whole_box = ((0,) * len(mapped.shape), mapped.shape)
        assert torch.equal(one.read(name, "weight", *whole_box), two.read(name, "weight", *whole_box))


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_our_tokenizers_in_their_form(name: str, tmp_path: Path) -> None:
    from megatron_port.core.errors import DataError
    from megatron_port.ext.corpora.hf_tokenizer import write_tokenizer
    from megatron_port.ext.corpora.tokenizer import get_tokenizer

    try:
        ours = get_tokenizer(name)
    except DataError as error:
        pytest.skip(str(error))
    checkpoint = saved(tmp_path / "ours", OURS[GPT2], ("weight",))
    checkpoint.manifest.state.extra["tokenizer"] = name  # type: ignore[index]
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "out", checkpoint)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"), local_files_only=True)
    mine = HFTokenizer(tmp_path / "out")
    for text in ("Hello, world!", "  two  spaces\nand\ttabs 123", "naïve — 東京 🙂", "\x00\x7f"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text) == mine.encode(text), text
        assert mine.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eod_id == mine.eod_id and mine.vocab_size == ours.vocab_size


def test_the_commands(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``checkpoint import --from hf`` and ``export --to hf``; a model file that a run can extend."""
    assert main(["checkpoint", "import", str(folders[LLAMA]), str(tmp_path / "in"), "--from", "hf"]) == 0
    step = tmp_path / "in" / "step-00000000"
    assert str(tmp_path / "in" / "model.toml") in capsys.readouterr().out
    from megatron_port.core.config.loader import load

    assert not model_differences(load(tmp_path / "in" / "model.toml").config.model, open_weights(step).model)
    export = ["checkpoint", "export", str(step), str(tmp_path / "out"), "--to", "hf"]
    assert main([*export, "--shard-size", "0.00004"]) == 0
    assert "max|Δ| / max|logit| = " in capsys.readouterr().out
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert main(export) == 5
