"""Adapters in PEFT's format: PEFT computes with an export what we do, and gives the same gradients."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import hf_models as hf
import pytest
import torch
from safetensors.torch import load_file

from megatron_port.core.checkpoint.format import SavedState
from megatron_port.core.checkpoint.reader import Checkpoint, open_checkpoint
from megatron_port.core.checkpoint.writer import save_checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.schema import CheckpointConfig, LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.data.batch import MicroBatch
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import StateReader
from megatron_port.core.engine.native import NativeEngine
from megatron_port.core.errors import CheckpointError
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.model.shapes import fingerprint
from megatron_port.ext.families import family_names
from megatron_port.ext.weights.adapter_spec import MAGNITUDE, adapter_parameters
from megatron_port.ext.weights.adapters import InitialAdapters, MergedWeights, over_base
from megatron_port.run.build import build_engine
from megatron_port.run.weights import open_weights
from megatron_port.tools.interop.dcp import whole
from megatron_port.tools.interop.export_hf import tensor_slabs
from megatron_port.tools.interop.hf_check import deviation, our_logits
from megatron_port.tools.interop.hf_files import HFFolder
from megatron_port.tools.interop.hf_names import hf_tensors
from megatron_port.tools.interop.merged import MergedCheckpoint
from megatron_port.tools.interop.peft import PeftFolder, export_peft

LORA = FineTuningConfig(method="lora", rank=3, alpha=5.0)
CASES = {
    "llama": ("llama", LORA),
    "llama dora": ("llama", replace(LORA, method="dora", rslora=True, targets=("query", "value", "gate", "down"))),
    "gpt2": ("gpt2", replace(LORA, rslora=True)),  # three adapters in one module, matrices transposed
    "gpt2 dora": ("gpt2", replace(LORA, method="dora", targets=("query", "value", "up"))),
    # PEFT 0.21 takes the MLP of every deepseek_v3 for experts'.
    "latent": ("deepseek_v3", replace(LORA, targets=("query_down", "query_up", "kv_down", "kv_up", "output"))),
    "neox": ("gpt_neox", LORA),  # rotated rows in another order
}
# PEFT 0.21 takes every feed-forward of these for experts'.
ATTENTION = {
    "deepseek_v2": CASES["latent"][1], "deepseek_v3": CASES["latent"][1],
    "qwen3_moe": replace(LORA, targets=("query", "key", "value", "output")),
}


def adapters_of(folder: HFFolder, tuning: FineTuningConfig) -> dict[str, torch.Tensor]:
    """Adapters that change the logits far beyond rounding; lengths near those of the rows."""
    generator = torch.Generator().manual_seed(11)
    begin = InitialAdapters(folder.model, tuning, 0, folder.read)
    out = {}
    for name, spec in adapter_parameters(folder.model, tuning).items():
        value = begin(name, "weight", (0,) * len(spec.shape), spec.shape).float()
        noise = torch.randn(spec.shape, generator=generator)
        out[name] = value * (1 + 0.2 * noise) if name.endswith(MAGNITUDE) else value + 0.03 * noise
    return out


def committed(
    path: Path, base: HFFolder, tuning: FineTuningConfig, adapters: dict[str, torch.Tensor]
) -> Checkpoint:
    """A checkpoint of adapters, as a run saves it."""
    run = RunConfig(
        engine="native", model=base.model, fine_tuning=tuning,
        checkpoint=CheckpointConfig(initial_weights=str(base.path)),
    )
    state = SavedState(
        step=4, samples=32, tokens=32, layout=LayoutConfig(), config=as_dict(run), scalars={"optimizer_steps": 4},
        extra={"base": {"fingerprint": fingerprint(base.model, base.read), "path": str(base.path)}},
    )
    pieces = [whole(name, "weight", tuple(t.shape), t) for name, t in adapters.items()]
    return open_checkpoint(save_checkpoint(path, state, pieces))


def base_of(family: str, folder: Path) -> HFFolder:
    """A small model of transformers' with large weights, as a folder."""
    config = {"llama": hf.llama, "gpt2": hf.gpt2, "gpt_neox": hf.neox}.get(family, partial(hf.small, family))(length=16)
    return HFFolder(hf.saved(hf.reference(config), folder))


def adapted_engine(
    model: ModelConfig, tuning: FineTuningConfig, read: StateReader, dtype: Any = "fp32"
) -> NativeEngine:
    """One process with adapters, whose state is what ``read`` has."""
    model = replace(model, hidden_dropout=0.0, attention_dropout=0.0)
    config = RunConfig(engine="native", model=model, fine_tuning=tuning, layout=LayoutConfig(vocab_padding_multiple=1))
    config = replace(config, precision=replace(config.precision, dtype=dtype))
    engine = build_engine(config, ParallelContext.single(), torch_providers(), initialise=False)
    engine.load_weights(read)
    assert isinstance(engine, NativeEngine)
    return engine


def reader_of(tensors: dict[str, torch.Tensor]) -> StateReader:
    def read(name: str, kind: str, offset: Any, shape: Any, /, *, out: Any = None) -> torch.Tensor:
        return tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, shape))]

    return read


@pytest.mark.parametrize("case", CASES)
def test_an_export_is_read_back_and_computes_the_same_merged_and_unmerged(case: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    family, tuning = CASES[case]
    base = base_of(family, tmp_path / "base")
    adapters = adapters_of(base, tuning)
    checkpoint = committed(tmp_path / "run", base, tuning, adapters)
    export_peft(checkpoint, tmp_path / "peft", lambda: base.read)
    back = PeftFolder(tmp_path / "peft", base.model, tuning).adapters
    assert back.keys() == adapters.keys()
    assert all(torch.equal(back[name], adapters[name]) for name in adapters)
    tokens = torch.randint(0, base.model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    apart = adapted_engine(base.model, tuning, over_base(base.read, reader_of(adapters), adapters))
    with torch.no_grad():
        unmerged = apart.chunks[0].eval()(tokens).transpose(0, 1)
    merged = our_logits(open_weights(checkpoint.path).read, base.model, tokens)
    assert deviation(merged, unmerged) <= 1e-6
    plain = our_logits(base.read, base.model, tokens)
    assert deviation(merged, plain) > 0.05
    if tuning.method == "lora":
        files_say(tmp_path / "peft", base, MergedCheckpoint(checkpoint))
    peft = pytest.importorskip("peft")
    theirs = peft.PeftModel.from_pretrained(hf.loaded(base.path), str(tmp_path / "peft"))
    with torch.no_grad():
        assert deviation(unmerged, theirs(tokens, use_cache=False).logits) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("family", family_names())
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_peft_computes_what_every_family_does(family: str, method: Literal["lora", "dora"], tmp_path: Path) -> None:
    """Its logits from an export are ours within rounding; in fp64 the merged weights give the same to 1e-12."""
    peft = pytest.importorskip("peft")
    tuning = replace(ATTENTION.get(family, LORA), method=method)
    base = base_of(family, tmp_path / "base")
    adapters = adapters_of(base, tuning)
    export_peft(committed(tmp_path / "run", base, tuning, adapters), tmp_path / "peft", lambda: base.read)
    tokens = torch.randint(0, base.model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    theirs = peft.PeftModel.from_pretrained(hf.loaded(base.path), str(tmp_path / "peft"))
    read, exact = over_base(base.read, reader_of(adapters), adapters), {n: a.double() for n, a in adapters.items()}
    with torch.no_grad():
        logits = theirs(tokens, use_cache=False).logits
        narrow, wide = (
            adapted_engine(base.model, tuning, read, dtype).chunks[0].eval()(tokens).transpose(0, 1)
            for dtype in ("fp32", "fp64")
        )
    assert deviation(narrow, logits) <= 1e-6
    merged = MergedWeights(base.model, tuning, lambda *at, out=None: base.read(*at).double(), reader_of(exact))  # type: ignore[arg-type,misc]
    assert deviation(our_logits(merged, base.model, tokens, dtype=torch.float64), wide) <= 1e-12


def files_say(folder: Path, base: HFFolder, merged: Checkpoint) -> None:
    """The merged export has, module by module, what PEFT's documentation makes of the files: W + alpha / r · B A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    found = load_file(folder / "adapter_model.safetensors")
    modules = {name.rsplit(".", 2)[0] for name in found}
    ours = {t.name: t for t in hf_tensors(base.model, base.family)}
    assert modules and all(name.startswith("base_model.model.") for name in modules)
    for module in modules:
        inside = next(t for t in config["target_modules"] if module.endswith(f".{t}"))
        rank = config["rank_pattern"].get(inside, config["r"])
        alpha = config["alpha_pattern"].get(inside, config["lora_alpha"])
        a, b = found[f"{module}.lora_A.weight"], found[f"{module}.lora_B.weight"]
        assert a.shape[0] == b.shape[1] == rank
        change = alpha / (rank**0.5 if config["use_rslora"] else rank) * b @ a
        change = change.t() if config["fan_in_fan_out"] else change
        name = f"{module.removeprefix('base_model.model.')}.weight"
        weight = base.tensor(name)
        assert weight is not None
        now = torch.cat(list(tensor_slabs(merged, ours[name])))
        assert torch.allclose(now, weight + change, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("case", ["llama", "llama dora"])
def test_gradients_are_pefts(case: str, tmp_path: Path) -> None:
    """In fp64, where transformers' model computes in it: of A, B and the lengths of each module."""
    peft = pytest.importorskip("peft")
    family, tuning = CASES[case]
    base = base_of(family, tmp_path / "base")
    adapters = adapters_of(base, tuning)
    export_peft(committed(tmp_path / "run", base, tuning, adapters), tmp_path / "peft", lambda: base.read)
    tokens = torch.randint(0, base.model.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    engine = adapted_engine(base.model, tuning, over_base(base.read, reader_of(adapters), adapters), "fp64")
    found: dict[str, torch.Tensor] = {}
    engine.on_gradients = lambda grads: found.update({record.name: g.clone() for record, g in grads})
    batch = MicroBatch((0, 1), tokens=tokens[:, :-1], labels=tokens[:, 1:])
    engine.train_step([batch], step=0, lr=0.0)
    plain = hf.loaded(base.path).double()
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "peft"), is_trainable=True).double()
    with hf.in_double(plain):
        logits = theirs(tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    rms = torch.cat([g.flatten() for g in found.values()]).square().mean().sqrt()
    assert len(found) == sum("lora_" in name for name, _ in theirs.named_parameters())
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            ours = found[canonical(name)]
            assert (ours - parameter.grad).abs().max() <= 1e-12 * (ours.square().mean().sqrt() + rms), name


def canonical(name: str) -> str:
    """Our name of a parameter of PEFT's Llama."""
    parts = {"q_proj": "attention.qkv.query", "k_proj": "attention.qkv.key", "v_proj": "attention.qkv.value",
             "o_proj": "attention.output", "gate_proj": "mlp.up.gate", "up_proj": "mlp.up.up", "down_proj": "mlp.down"}
    kinds = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "magnitude"}
    words = name.split(".")
    at = words.index("layers")
    kind = next(kinds[w] for w in words if w in kinds)
    return f"layers.{words[at + 1]}.{parts[words[at + 3]]}.{kind}"


def test_other_frozen_weights_and_other_adapters_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    base = base_of("llama", tmp_path / "base")
    adapters = adapters_of(base, LORA)
    checkpoint = committed(tmp_path / "run", base, LORA, adapters)
    other = hf.saved(hf.reference(hf.llama(16), seed=1), tmp_path / "other")
    with pytest.raises(CheckpointError, match="adapters of other weights than those of"):
        open_weights(checkpoint.path, base=str(other))
    with pytest.raises(CheckpointError, match="the weights beside which they were trained are not at"):
        open_weights(checkpoint.path, base=str(tmp_path / "nothing"))
    export_peft(checkpoint, tmp_path / "peft", lambda: base.read)
    for change, word in (
        ({"rank": 4}, "rank 3"), ({"alpha": 6.0}, "alpha 5"), ({"targets": ("key",)}, "belongs to no adapter"),
        ({"method": "dora"}, 'adapters of method "lora"'),
    ):
        with pytest.raises(CheckpointError, match=word):
            PeftFolder(tmp_path / "peft", base.model, replace(LORA, **change))  # type: ignore[arg-type]


def test_adapters_of_another_meaning_are_refused_by_name(tmp_path: Path) -> None:
    """Every field that PEFT's own class has: off as PEFT writes it, and named where it is on. What is unknown is
    refused, and so is each initialisation that changes the frozen weights: PEFT is asked which do."""
    peft = pytest.importorskip("peft")
    base = base_of("llama", tmp_path / "base")
    export_peft(committed(tmp_path / "run", base, LORA, adapters_of(base, LORA)), tmp_path / "peft", lambda: base.read)
    path = tmp_path / "peft" / "adapter_config.json"
    ours = json.loads(path.read_text())
    theirs = {k: sorted(v) if isinstance(v, set) else v for k, v in peft.LoraConfig().to_dict().items()}

    def read(**changes: Any) -> PeftFolder:
        path.write_text(json.dumps({**theirs, **ours, **changes}, default=str))
        return PeftFolder(tmp_path / "peft", base.model, LORA)

    read()
    read(use_new_thing=False, new_table={}, merge_weights=False)
    for name, value in {
        "use_new_thing": True, "bias": "all", "modules_to_save": ["lm_head"], "target_parameters": ["x"],
        "alora_invocation_tokens": [1, 2], "kasa_config": {"beta": 1}, "velora_config": {"rank": 1}, "lora_bias": True,
        "monteclora_config": {"samples": 2}, "arrow_config": {"top_k": 1}, "layer_replication": [[0, 2]],
        "trainable_token_indices": [5], "use_qalora": True, "use_bdlora": {"nblocks": 2}, "megatron_config": {"tp": 1},
    }.items():
        with pytest.raises(CheckpointError, match=rf"adapter_config.json: {name} .* cannot be continued here"):
            read(**{name: value})
    weights = {p: t.clone() for p, t in hf.loaded(base.path).state_dict().items()}
    for initial in (True, False, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", "mica", "corda", "loftq"):
        if initial not in ("mica", "corda", "loftq"):  # it trains A alone; they need data or a quantised model
            made = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=initial)
            inside = peft.get_peft_model(hf.loaded(base.path), made).state_dict()
            name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
            kept = torch.equal(inside[name], weights["model.layers.0.self_attn.q_proj.weight"])
            assert kept == (initial in (True, False, "gaussian", "orthogonal")), initial
        if initial in (True, False, "gaussian", "orthogonal"):
            read(init_lora_weights=initial)
            continue
        with pytest.raises(CheckpointError, match=rf"init_lora_weights is '{initial}'.*merge_and_unload"):
            read(init_lora_weights=initial)
    for changes, message in (
        ({"rank_pattern": {"(": 3}}, "is no rule"), ({"lora_alpha": "five"}, "is no rule"),
        ({"rank_pattern": [1]}, "is no rule"), ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read(**changes)


def test_the_fingerprint_is_of_values_whatever_holds_them(tmp_path: Path) -> None:
    """Every parameter counts; how they are stored does not."""
    pytest.importorskip("transformers")
    base = base_of("gpt2", tmp_path / "base")
    found = fingerprint(base.model, base.read)
    assert found == fingerprint(base.model, lambda *box, out=None: base.read(*box).double())  # type: ignore[arg-type,misc]
    for changed in ("final_norm.bias", "layers.2.mlp.down.weight"):
        def read(name: str, *box: Any, out: Any = None, changed: str = changed) -> torch.Tensor:
            return base.read(name, *box) + (name == changed)

        assert fingerprint(base.model, read) != found, changed


def test_merged_weights_are_float32_or_wider_whatever_is_frozen() -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=9, seq_length=4)
    specs = adapter_parameters(model, LORA)
    ones = {name: torch.ones(spec.shape) for name, spec in specs.items()}
    merged = MergedWeights(
        model, LORA, lambda name, kind, offset, shape, out=None: torch.ones(shape, dtype=torch.bfloat16),  # type: ignore[arg-type,misc]
        reader_of(ones),
    )
    weight = merged("layers.0.mlp.down.weight", "weight", (0, 0), (8, 32))
    assert weight.dtype == torch.float32 and torch.allclose(weight, torch.full((8, 32), 1 + 5.0))
