"""Every registered family, without a line of its own here: names, shapes, counts, logits, and nothing lost in silence.

transformers is the oracle: its model of the family says which tensors there are and what the logits are.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import hf_models as hf
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_spec import differing, stage_records

from megatron_port.cli.main import main
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.config.choices import CHOICES
from megatron_port.core.config.loader import load
from megatron_port.core.config.model import MoEConfig, RecurrentConfig
from megatron_port.core.config.schema import ModelConfig, RunConfig
from megatron_port.core.dist.mesh import Topology
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.shapes import model_records
from megatron_port.core.registry import FAMILIES
from megatron_port.ext.families import family_named, family_names
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.run.config_hash import config_hash
from megatron_port.run.same_model import model_differences
from megatron_port.tools.interop.export_hf import export_hf, exported_model
from megatron_port.tools.interop.hf_config import another_family, family_for, hf_config, model_from_hf
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.interop.hf_names import hf_mapping, hf_tensors
from megatron_port.tools.interop.run_import import import_checkpoint
from megatron_port.tools.interop.universal import megatron_names
from megatron_port.tools.plan.case import Case
from megatron_port.tools.plan.elements import stage_elements
from megatron_port.tools.plan.engines import ENGINES

transformers = pytest.importorskip("transformers")
SHAPES = {
    "gpt2": ("gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1558m"), "gptj": ("gpt-j-6b",),
    "llama": ("llama-tiny", "llama-1b", "llama-8b", "llama-70b", "llama-405b"), "mistral": ("mistral-7b",),
    "mixtral": ("mixtral-8x7b", "mixtral-8x22b"), "gemma2": ("gemma-2-2b", "gemma-2-9b"),
    "gemma3_text": ("gemma-3-1b",), "qwen2": ("qwen2.5-0.5b", "qwen2.5-7b"), "qwen2_moe": ("qwen2-57b-a14b",),
    "qwen3": ("qwen3-tiny", "qwen3-0.6b", "qwen3-8b"), "qwen3_moe": ("qwen3-30b-a3b", "qwen3-235b-a22b"),
    "qwen3_next": ("qwen3-next-80b-a3b",), "lfm2": ("lfm2-1.2b",), "bamba": ("bamba-9b",),
    "kimi_linear": ("kimi-linear-48b-a3b",), "olmo_hybrid": ("olmo-hybrid-7b",),
    "granitemoehybrid": ("granite-4.0-h-tiny",), "falcon_h1": ("falcon-h1-0.5b",), "mamba2": ("mamba-codestral-7b",),
    "nemotron_h": ("nemotron-h-8b", "nemotron-3-nano-30b-a3b"),
    "deepseek_v2": ("deepseek-v2-lite",), "deepseek_v3": ("deepseek-v3",), "olmo2": ("olmo-2-7b", "olmo-2-32b"),
    "olmoe": ("olmoe-1b-7b",), "phi3": ("phi-4",), "starcoder2": ("starcoder2-3b",), "smollm3": ("smollm3-3b",),
    "gpt_oss": ("gpt-oss-20b", "gpt-oss-120b"), "falcon": ("falcon-7b", "falcon-40b"), "granite": ("granite-3-8b",),
}
"""Family → shapes of ``configs/models`` that are its own."""


@pytest.fixture(params=family_names())
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def plain_model(family: str) -> ModelConfig:
    """The model of a family's small config.json, to be exported as that family."""
    with tempfile.TemporaryDirectory() as folder:
        return replace(model_from_hf(written(family, Path(folder)), "config.json"), family=family)


def written(family: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A small config.json of a family as transformers writes it."""
    hf.small(family, **changes).save_pretrained(str(folder))
    body = json.loads((folder / "config.json").read_text())
    assert isinstance(body, dict)
    return body


def test_the_spec_is_transformers_model(family: str, tmp_path: Path) -> None:
    """Tensors by name and shape, and their number, tied and not; the planner holds as many on its one rank."""
    for tied in (False, True):
        config = hf.small(family, tie_word_embeddings=tied)
        with torch.device("meta"):
            network = transformers.AutoModelForCausalLM.from_config(config)
        model = model_from_hf(written(family, tmp_path, tie_word_embeddings=tied), "config.json")
        ours = {t.name: t.shape for t in hf_tensors(model, family)}
        buffers = {name: b for name, b in network.named_buffers() if name in network.state_dict()}
        theirs = hf.in_files(network, {**dict(network.named_parameters()), **buffers})
        assert ours == {n: tuple(p.shape) for n, p in hf.as_published(model, family, theirs).items()}
        assert parameter_count(model) == sum(p.numel() for p in network.parameters())
        alone = Case(model=model, engine=ENGINES["native"], vocab_multiple=1)
        assert stage_elements(alone, 0) == parameter_count(model)
        assert family_for(model) == family


def test_a_model_that_is_not_of_its_family_is_told_before_it_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """A vocabulary that the data give is no reason; another family's name is."""
    llama = ModelConfig(
        family="llama", position_embedding="rope", normalization="rmsnorm", activation="swiglu", vocab_size=0
    )
    assert another_family(llama) == another_family(replace(llama, family="auto", normalization="layernorm")) == ""
    said = another_family(replace(llama, position_embedding="learned"))
    assert "model.family = 'llama'" in said and "needs position_embedding = rope" in said
    main(["train", "models/gpt-tiny", "--dry-run", "--set", "model.family=llama", "--set", "data.synthetic=true"])
    assert "warning: model.family = 'llama'" in capsys.readouterr().out



def test_modules_hold_what_the_spec_states(family: str, tmp_path: Path) -> None:
    model = model_from_hf(written(family, tmp_path), "config.json")
    assert {r.name: r for r in stage_records(model, Topology(), 0, sp=False)} == model_records(model)
    for sp in (False, True):
        built = stage_records(model, Topology(tp=2, kv_copies=2 // min(model.kv_heads, 2)), 1, sp=sp)
        for spec in model_spec(model).parameters():
            assert not differing(spec, [r for r in built if r.name == spec.name], 2, sp, 112), spec.name


def test_there_and_back(family: str, tmp_path: Path) -> None:
    """Import and export: every tensor equal to the bit; the export checks its logits against transformers itself."""
    source = HFFolder(hf.saved(hf.reference(hf.small(family), scale=1.0), tmp_path / "source"))
    checkpoint = open_checkpoint(import_checkpoint(source.path, tmp_path / "ours", note=lambda _: None))
    found = export_hf(checkpoint, tmp_path / "back", note=lambda _: None)
    # Without norms of what attention reads, or where a state is normed, rounding alone moves the scaled logits too far.
    least = 1.0 if source.model.norm_placement == "post" or source.model.mixers != ("attention",) else 2.0
    assert found is not None and found.deviation <= found.tolerance and found.scale >= least
    back = HFFolder(tmp_path / "back")
    assert not model_differences(source.model, back.model)
    for tensor in hf_tensors(source.model, family):
        one, two = source.tensor(tensor.name), back.tensor(tensor.name)
        assert one is not None and two is not None and torch.equal(one, two), tensor.name


def ahead_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of one module of multi-token prediction behind three layers, by the names of DeepSeek-V3's files."""
    generator, at = torch.Generator().manual_seed(3), "model.layers.3."
    own = {
        "enorm.weight": (64,), "hnorm.weight": (64,), "eh_proj.weight": (64, 128), "shared_head.norm.weight": (64,),
    }
    layer = {n.removeprefix("model.layers.2."): t.shape for n, t in tensors.items() if n.startswith("model.layers.2.")}
    drawn = {at + n: torch.randn(shape, generator=generator) for n, shape in {**own, **layer}.items()}
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return drawn | {at + name: tensors[there].clone() for name, there in copies.items()}


def test_modules_that_predict_further_tokens_are_further_layers_there(tmp_path: Path) -> None:
    """DeepSeek-V3's, which transformers ignores: there and back to the bit, with their copies of both tables."""
    folder = hf.saved(hf.reference(hf.small("deepseek_v3"), scale=1.0), tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    ahead = ahead_of(tensors)
    body = json.loads((folder / "config.json").read_text())
    body |= {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(body))
    without = HFFolder(folder)  # transformers' default, of which it saves nothing
    assert without.model.mtp_layers == 0 and "num_nextn_predict_layers is 1, and the files have no" in without.notes[0]
    save_file({**tensors, "model.layers.3.enorm.weight": ahead["model.layers.3.enorm.weight"]},
              folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.3.* is not in its files.*num_nextn_predict_layers; 0 imports"):
        HFFolder(folder)
    save_file(tensors | ahead, folder / "model.safetensors")
    source = HFFolder(folder)
    assert source.model.mtp_layers == 1
    with pytest.raises(CheckpointError, match="first_k_dense_replace is 3 of 3 layers and 1 that"):
        model_from_hf({**body, "first_k_dense_replace": 3}, "config.json")
    for ours, there in {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj",
                        "norm": "shared_head.norm", "layer.attention.output": "self_attn.o_proj"}.items():
        theirs = ahead[f"model.layers.3.{there}.weight"]
        offset = (0,) * theirs.dim()
        assert torch.equal(source.read(f"mtp.0.{ours}.weight", "weight", offset, tuple(theirs.shape)), theirs)
    checkpoint = open_checkpoint(import_checkpoint(folder, tmp_path / "ours", note=lambda _: None))
    found = export_hf(checkpoint, tmp_path / "back", note=lambda _: None)
    assert found is not None and found.deviation <= found.tolerance
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == (tensors | ahead).keys()
    assert all(torch.equal(back[name], t) for name, t in (tensors | ahead).items())
    other = "model.layers.3.embed_tokens.weight"
    save_file({**back, other: back[other] + 1}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="layers.3.embed_tokens.weight is not model.embed_tokens.weight"):
        HFFolder(folder)
    del back[other]
    save_file(back, folder / "model.safetensors")
    HFFolder(folder)
    said: list[str] = []  # a family without such modules is exported without them, and says so
    llama = replace(model_from_hf(written("llama", tmp_path), "config.json"), mtp_layers=2)
    assert exported_model(llama, said.append) == (replace(llama, mtp_layers=0), "llama")
    assert "mtp_layers 2 is left out" in said[0]
    assert not model_differences(llama, replace(llama, mtp_layers=0), any_length=True)
    assert model_differences(replace(llama, mtp_layers=0), llama, any_length=True)


def test_an_unknown_field_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """One that transformers reads; one that it does not is left out with a line, unless the file is a later one's."""
    body, notes = written(family, tmp_path), list[str]()
    model = model_from_hf(body, "config.json", notes)
    assert not notes, notes
    with pytest.raises(CheckpointError, match=r"config.json: unknown field attention_chunk_size \(8\): it may"):
        model_from_hf({**body, "attention_chunk_size": 8, "a_switch": 1}, "config.json")
    more = {"bits": 4, "a_switch": False, "num_mtp_layers": None, "decoder": None}
    assert model_from_hf({**body, **more}, "config.json", notes) == model
    (said,) = notes
    assert re.fullmatch(r"config.json: 2 fields left out, which .* for this family: a_switch .*, bits \(4\)", said)
    with pytest.raises(CheckpointError, match=r"unknown field bits \(4\).* The file is of transformers 77.0.0;"):
        model_from_hf({**body, "bits": 4, "transformers_version": "77.0.0"}, "config.json")
    with pytest.raises(CheckpointError, match=r"quantization_config: weights are stored as 'mxfp4'; write them as"):
        model_from_hf({**body, "quantization_config": {"quant_method": "mxfp4"}}, "config.json")


def test_an_unknown_rope_field_is_refused_by_name() -> None:
    for family in family_names():
        body = hf.small(family).to_dict()
        if "rope_parameters" not in body:
            continue
        body["rope_parameters"] = {**body["rope_parameters"], "attention_factor": 1.3, "rope_type": "default"}
        with pytest.raises(CheckpointError, match=r"unknown field attention_factor \(1.3\)"):
            model_from_hf(body, "config.json")


def another(name: str, value: Any) -> list[Any]:
    """Other values of a field of a model."""
    if isinstance(value, MoEConfig | RecurrentConfig):
        return [replace(value, **{f.name: v}) for f in fields(value)
                for v in another(f"{name}.{f.name}", getattr(value, f.name))]
    if isinstance(value, bool):
        return [not value]
    if name == "mixer_pattern":
        return [("gated_delta",), ("attention", "gated_delta")]
    if isinstance(value, tuple):
        return [("none",), ("rope", "none")] if name == "rope_pattern" else [("full", "window"), ("window",)]
    if isinstance(value, str):
        return [choice for choice in CHOICES.get(f"model.{name}", ()) if choice != value]
    return [value * 2 or 1, value + 1] if isinstance(value, int) else [value / 2 or 0.5, value + 1.5]


@pytest.mark.parametrize("field", [f.name for f in fields(ModelConfig) if f.name not in ("name", "family")])
def test_no_field_of_a_model_is_lost(field: str, family: str) -> None:
    """A changed field is exported so that it comes back, or it is refused: a family never stands for another model."""
    model = plain_model(family)
    for value in another(field, getattr(model, field)):
        changed = replace(model, **{field: value})
        try:
            body = hf_config(changed, dtype="float32", eos=None)
        except CheckpointError as error:
            assert f"{family} needs " in str(error)
            continue
        unscaled = model.position_embedding != "rope" or model.rope_scaling == "none"
        of_windows = field == "window_rope_theta" and model.position_embedding != "rope"
        if of_windows or (field.startswith(("rope_", "rotary_")) and unscaled):
            continue  # without effect on this model
        if field not in ("hidden_dropout", "attention_dropout"):
            assert not model_differences(model_from_hf(body, "back"), changed), (field, value)


def test_a_family_that_computes_what_another_does_is_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A plugin's copy of Llama's family is exported as itself, and trains as any other."""
    twin = replace(family_named("llama"), name="aquila", architecture="AquilaForCausalLM")
    monkeypatch.setitem(FAMILIES._added, "aquila", twin)
    model = model_from_hf({**written("llama", tmp_path), "model_type": "aquila"}, "config.json")
    assert model.family == family_for(model) == "aquila"
    assert hf_config(model, dtype="float32", eos=None)["architectures"] == ["AquilaForCausalLM"]
    plain = replace(model, family="auto")
    assert family_for(plain) == "llama" and not model_differences(plain, model)
    assert config_hash(RunConfig(model=plain)) == config_hash(RunConfig(model=model))
    with pytest.raises(CheckpointError, match=r"computes what this model does: aquila needs activation = swiglu$"):
        family_for(replace(model, activation="gelu"))
    monkeypatch.setitem(FAMILIES._added, "aquila2", twin)
    with pytest.raises(ConfigError, match="'aquila2' has model_type 'aquila'; register it under"):
        family_named("aquila2")
    with pytest.raises(CheckpointError, match=r"model.family 'yi' is not registered here; .* gpt2, gpt_neox"):
        family_for(replace(model, family="yi"))


def test_a_parameter_without_a_name_there_is_refused() -> None:
    """By its name, not with a KeyError."""
    with pytest.raises(CheckpointError, match=r"embedding.position.weight: a llama model has no such parameter"):
        hf_mapping(ModelConfig(), "llama")


def test_a_parameter_that_megatron_deepspeed_lacks_is_refused() -> None:
    """By its name: its layers have no norms of heads."""
    assert megatron_names(ModelConfig())
    with pytest.raises(CheckpointError, match=r"layers.0.attention.query_norm.weight: Megatron-DeepSpeed's layers"):
        megatron_names(ModelConfig(qk_norm=True))


@pytest.mark.parametrize(("family_name", "shape"), [(name, shape) for name in SHAPES for shape in SHAPES[name]])
def test_shipped_shapes_are_their_familys(family_name: str, shape: str, tmp_path: Path) -> None:
    """They have the parameters of transformers' model of the same configuration, and of the comment on top."""
    found = load(f"models/{shape}")
    model = found.config.model
    assert family_for(model) == family_name
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model, dtype="float32", eos=None)))
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(str(tmp_path)))
    assert parameter_count(model) == sum(p.numel() for p in network.parameters())
    said = re.search(r"([0-9,]{9,}) parameters", Path(found.files[-1]).read_text())
    assert said is None or int(said[1].replace(",", "")) == parameter_count(model)


def test_families_need_no_torch() -> None:
    code = "import sys, megatron_port.ext.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
