"""Pruned checkpoints against transformers' models sliced by hand, and everything that is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import hf_models as hf
import numpy as np
import pytest
import torch
from interop_cases import EXPERTS, GPT2, LLAMA, read_all, saved

from megatron_port.cli.main import main
from megatron_port.core.checkpoint.reader import open_checkpoint
from megatron_port.core.config.checks import problems
from megatron_port.core.config.features import FineTuningConfig
from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, MoEConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import InitSpec, initial_values, record_of
from megatron_port.core.engine.module import read_local
from megatron_port.core.errors import CheckpointError, ConfigError
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.shapes import fingerprint
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.ext.weights.settings import factored_shapes
from megatron_port.run.weights import open_weights
from megatron_port.tools.compress.convert import HEADS, MultipliedWeights, convert, plain, plain_model
from megatron_port.tools.compress.importance import Importance, read_importance, write_importance
from megatron_port.tools.compress.request import PrunedWeights, Request
from megatron_port.tools.compress.selection import Sizes, largest, pruned_model, select
from megatron_port.tools.interop.export_hf import export_hf
from megatron_port.tools.interop.hf_check import our_logits
from megatron_port.tools.plan.text import make_plan

transformers = pytest.importorskip("transformers")


def scores_of(model: ModelConfig, seed: int = 3) -> dict[str, np.ndarray]:
    """Drawn importance of everything."""
    draw, layers = np.random.default_rng(seed), model.num_layers
    return {
        "layers": draw.random(layers), "heads": draw.random((layers, model.num_attention_heads)),
        "ffn": draw.random((layers, model.ffn_size)), "experts": draw.random((layers, max(model.moe.num_experts, 1))),
        "hidden": draw.random(model.hidden_size),
    }


def best(values: np.ndarray, count: int) -> list[int]:
    """torch's choice of the largest, ascending."""
    return sorted(torch.topk(torch.from_numpy(values), count).indices.tolist())


def pruned_folder(tmp_path: Path, theirs: Any, sizes: Sizes) -> tuple[Path, dict[str, np.ndarray]]:
    """A transformers model, saved, pruned here with drawn importance, and exported; and the importance."""
    source = open_weights(hf.saved(theirs, tmp_path / "theirs"))
    scores = scores_of(source.model)
    chosen = select(source.model, sizes, scores)
    path = convert(source, chosen.model, PrunedWeights(chosen, source.read), tmp_path / "pruned",
                   provenance={"method": "prune"}, slab_bytes=4096, note=lambda text: None)
    agreement = export_hf(open_checkpoint(path), tmp_path / "folder", weights_only=True, note=lambda text: None)
    assert agreement is not None and agreement.deviation <= agreement.tolerance
    return tmp_path / "folder", scores


def same_logits(folder: Path, sliced: Any) -> None:
    """Both by transformers: of the exported files, and of the model whose tensors were sliced by hand."""
    tokens = torch.randint(0, hf.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert hf.relative(hf.loaded(folder)(tokens).logits, sliced(tokens).logits) <= 1e-6


def heads_to_rows(heads: list[int], size: int) -> torch.Tensor:
    return torch.cat([torch.arange(h * size, (h + 1) * size) for h in heads])


@pytest.mark.parametrize("sizes", [
    Sizes(layers=2, heads=4, groups=2, ffn=40, hidden=48), Sizes(groups=1), Sizes(heads=4), Sizes(layers=1),
])
def test_a_pruned_llama_is_the_sliced_one(tmp_path: Path, sizes: Sizes) -> None:
    """Layers, groups with their query heads, query heads of each group, MLP rows, features: all at once and alone."""
    theirs = hf.reference(hf.llama(num_attention_heads=8, num_key_value_heads=4, head_dim=12))
    folder, scores = pruned_folder(tmp_path, theirs, sizes)
    groups = sizes.groups or 4
    each = sizes.heads // groups if sizes.heads else 2
    width, rows = sizes.hidden or 64, sizes.ffn or 96
    layers = best(scores["layers"], sizes.layers) if sizes.layers else [0, 1, 2]
    features = torch.tensor(best(scores["hidden"], width))
    config = hf.llama(num_hidden_layers=len(layers), hidden_size=width, num_attention_heads=groups * each,
                      num_key_value_heads=groups, head_dim=12, intermediate_size=rows)
    sliced, before = transformers.LlamaForCausalLM(config).eval(), theirs.state_dict()
    after = {name: before[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    after = {name: t[:, features] for name, t in after.items()} | {
        "model.norm.weight": before["model.norm.weight"][features]
    }
    for new, old in enumerate(layers):
        by_group = scores["heads"][old].reshape(4, 2)
        inner = [best(row, each) for row in by_group]
        kept = best(np.array([by_group[g][inner[g]].sum() for g in range(4)]), groups)
        q = heads_to_rows([2 * g + h for g in kept for h in inner[g]], 12)
        kv, f = heads_to_rows(kept, 12), torch.tensor(best(scores["ffn"][old], rows))
        here, there = f"model.layers.{new}.", f"model.layers.{old}."
        for part, out, into in (
            ("self_attn.q_proj", q, features), ("self_attn.k_proj", kv, features), ("self_attn.v_proj", kv, features),
            ("self_attn.o_proj", features, q), ("mlp.gate_proj", f, features), ("mlp.up_proj", f, features),
            ("mlp.down_proj", features, f),
        ):
            after[f"{here}{part}.weight"] = before[f"{there}{part}.weight"][out][:, into]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            after[f"{here}{norm}.weight"] = before[f"{there}{norm}.weight"][features]
    sliced.load_state_dict(after)
    same_logits(folder, sliced)


def test_a_pruned_gpt2_is_the_sliced_one(tmp_path: Path) -> None:
    """Biases, learned positions, LayerNorms, a tied table, matrices that lie transposed."""
    theirs = hf.reference(hf.gpt2())
    folder, scores = pruned_folder(tmp_path, theirs, Sizes(layers=2, ffn=100))
    sliced = transformers.GPT2LMHeadModel(hf.gpt2(n_layer=2, n_inner=100)).eval()
    layers, before = best(scores["layers"], 2), theirs.state_dict()
    after = {name: t for name, t in before.items() if ".h." not in name}
    for new, old in enumerate(layers):
        f = torch.tensor(best(scores["ffn"][old], 100))
        for name, tensor in before.items():
            if name.startswith(f"transformer.h.{old}."):
                cut = tensor[..., f] if "c_fc" in name else tensor[f] if name.endswith("mlp.c_proj.weight") else tensor
                after[name.replace(f".h.{old}.", f".h.{new}.", 1)] = cut
    sliced.load_state_dict(after)
    same_logits(folder, sliced)


def test_a_pruned_mixtral_is_the_sliced_one(tmp_path: Path) -> None:
    """Experts and their rows of the router, other ones in each layer; and the features of all of them."""
    theirs = hf.reference(hf.small("mixtral"))
    folder, scores = pruned_folder(tmp_path, theirs, Sizes(experts=3, hidden=40))
    config = hf.small("mixtral", num_local_experts=3, num_experts=3, hidden_size=40, num_experts_per_tok=3, head_dim=24)
    config._experts_implementation = "eager"
    sliced = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    features, after = torch.tensor(best(scores["hidden"], 40)), {}
    for name, tensor in theirs.state_dict().items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        e = torch.tensor(best(scores["experts"][layer], 3))
        if ".experts." in name or name.endswith("gate.weight"):
            tensor = tensor[e]
        wide = [d for d, n in enumerate(tensor.shape) if n == 64]
        assert len(wide) == 1, name
        after[name] = tensor.index_select(wide[0], features)
    sliced.load_state_dict(after)
    same_logits(folder, sliced)


@pytest.mark.parametrize("family", ["deepseek_v3", "olmo2", "gpt_oss", "gptj", "gemma2", "qwen3_moe"])
def test_families_are_pruned_and_exported(tmp_path: Path, family: str) -> None:
    """Latents, norms over all heads, sinks, biases, windows: the export compares every one with transformers."""
    sizes = {"deepseek_v3": Sizes(heads=2, hidden=40), "gemma2": Sizes(layers=2, ffn=50, groups=1),
             "gptj": Sizes(ffn=50, layers=2), "gpt_oss": Sizes(groups=1, experts=3),
             "qwen3_moe": Sizes(layers=2, heads=2, experts=4), "olmo2": Sizes(groups=1, ffn=40)}[family]
    changes = {"head_dim": 16} if family == "olmo2" else {}
    theirs = hf.reference(hf.small(family, **changes), scale=1.0)
    pruned_folder(tmp_path, theirs, sizes)


def test_the_checkpoint_is_the_same_in_any_slabs_and_says_what_it_is_of(tmp_path: Path) -> None:
    source = open_weights(saved(tmp_path / "a", EXPERTS).path)
    chosen = select(source.model, Sizes(layers=1, heads=2, experts=3, hidden=20), scores_of(source.model))
    read = PrunedWeights(chosen, source.read)
    made = [
        convert(source, chosen.model, read, tmp_path / str(n), provenance={"method": "prune", "kept": chosen.digest()},
                slab_bytes=n, note=lambda text: None)
        for n in (64, 1 << 20)
    ]
    a, b = map(open_checkpoint, made)
    for kind in ("weight", "buffer") if "buffer" in a.kinds() else ("weight",):
        one, two = read_all(a, kind), read_all(b, kind)
        assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    assert sum(t.numel() for t in read_all(a).values()) == parameter_count(chosen.model)
    said = a.extra["compressed"]
    assert said["source_step"] == 12 and said["kept"] == chosen.digest() and a.extra["tokenizer"] == "byte"
    assert a.kinds() == tuple(k for k in a.kinds() if k in ("weight", "buffer")) and a.step == 0
    again = open_weights(made[0])
    assert again.model == chosen.model
    smaller = select(again.model, Sizes(heads=1, groups=1), scores_of(again.model))
    last = convert(again, smaller.model, PrunedWeights(smaller, again.read), tmp_path / "c",
                   provenance={"method": "prune"}, note=lambda text: None)
    assert open_checkpoint(last).extra["compressed"]["before"]["kept"] == chosen.digest()


def test_patterns_follow_the_layers_that_are_left() -> None:
    model = dataclasses.replace(
        LLAMA, num_layers=6, sliding_window=4, attention_pattern=("window", "window", "full"),
        rope_pattern=("rope", "none"), norm_pattern=("pre", "post", "sandwich"),
    )
    left = pruned_model(model, Sizes(), (0, 2, 5))
    assert [left.window_of(i) for i in range(3)] == [4, 0, 0]
    assert [left.rotates(i) for i in range(3)] == [True, True, False]
    assert left.norm_pattern == ("pre", "sandwich", "sandwich") and left.norm_placement == "pre"
    assert pruned_model(model, Sizes(), (1, 4)).norm_placement == "post"
    moe = dataclasses.replace(LLAMA, num_layers=6, moe=MoEConfig(num_experts=4, first_dense=1, every=2))
    assert [moe.moe.has_experts(i) for i in range(6)] == [False, False, True, False, True, False]
    left = pruned_model(moe, Sizes(), (0, 2, 4))
    assert [left.moe.has_experts(i) for i in range(3)] == [False, True, True]
    with pytest.raises(ConfigError, match="no first_dense and every"):
        pruned_model(moe, Sizes(), (2, 3, 4, 5, 0, 1))


def test_of_equal_importance_the_lower_index_stays() -> None:
    assert largest(np.array([1.0, 3.0, 3.0, 0.0, 3.0]), 2).tolist() == [1, 2]
    assert largest(np.array([-1.0, 5.0, -2.0, 4.0]), 3).tolist() == [0, 1, 3]


def test_a_group_counts_by_the_heads_that_it_keeps() -> None:
    """The first group's best head is the best of all, the second's two are better together."""
    scores = {"heads": np.array([[5.0, 0.0, 3.0, 3.0]] * LLAMA.num_layers)}
    assert select(LLAMA, Sizes(heads=1, groups=1), scores).indices[HEADS, 0].tolist() == [0]
    assert select(LLAMA, Sizes(groups=1), scores).indices[HEADS, 0].tolist() == [2, 3]


@pytest.mark.parametrize(("model", "sizes", "said"), [
    (LLAMA, Sizes(heads=3), "3 query heads do not divide by 2 key/value heads; use --heads 2"),
    (LLAMA, Sizes(heads=4, groups=1), "4 for each, and the model has 2: use --heads 2"),
    (LLAMA, Sizes(ffn=49), "--ffn 49: the model has 48"),
    (LLAMA, Sizes(experts=2), "no layers of experts"),
    (EXPERTS, Sizes(experts=1), "top_k 2 experts; use at least 2"),
    (dataclasses.replace(EXPERTS, moe=MoEConfig(num_experts=4)), Sizes(ffn=8), "every layer has experts"),
    (dataclasses.replace(EXPERTS, moe=MoEConfig(num_experts=4, groups=2, top_groups=1)), Sizes(experts=3),
     "use a multiple of 2"),
    (GPT2, Sizes(layers=4), "--layers 4: the model has 3"),
    (GPT2, Sizes(hidden=-1), "--hidden -1"),
])
def test_what_cannot_be_had_is_refused_with_what_to_change(model: ModelConfig, sizes: Sizes, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        select(model, sizes, scores_of(model))
    assert said in str(error.value)


def test_a_file_of_importance_is_verified_and_belongs_to_its_weights(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "a", LLAMA)
    source = open_weights(checkpoint.path)
    found = Importance(scores=scores_of(LLAMA), source="a", fingerprint=fingerprint(LLAMA, source.read), corpus="c",
                       tokens=3, loss=1.5)
    path = tmp_path / "importance.safetensors"
    write_importance(path, found)
    assert read_importance(path).digest() == found.digest()
    raw = path.read_bytes()
    for at in (len(raw) - 3, raw.index(b"facts") + 12, len(raw) // 2):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(CheckpointError, match=r"damaged|no file of importance"):
            read_importance(path)
    write_importance(path, dataclasses.replace(found, fingerprint="0" * 32))
    with pytest.raises(CheckpointError, match="measured on other weights"):
        Request(sizes=Sizes(layers=1), importance=path).made_of(source)


def test_the_command_plans_makes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "a", LLAMA).path
    assert main(["compress", "plan", str(source), "--ffn", "24", "--json"]) == 0
    assert '"parameters"' in capsys.readouterr().out
    assert main(["compress", "plan", "runs/frontier-22b", "--factor", "all", "--budget", "0.5", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["after"]
    assert planned["family"] == "gpt2" and planned["memory"] < planned["limit"] == 64e9
    run = load("runs/frontier-22b", [f"model.{n}_rank={r}" for n, r in (
        ("qkv", 2304), ("output", 1536), ("up", 2432), ("down", 2432))]).config
    plan = make_plan(run, neighbours=False)
    assert (planned["memory"], planned["step_seconds"]) == (plan.fullest.total, plan.step.seconds)
    assert main(["compress", "run", str(source), str(tmp_path / "b"), "--drop-layers", "0"]) == 0
    made, before = open_checkpoint(tmp_path / "b" / "step-00000000"), open_checkpoint(source)
    assert torch.equal(read_all(made)["layers.0.mlp.up.weight"], read_all(before)["layers.1.mlp.up.weight"])
    assert (tmp_path / "b" / "model.toml").is_file()
    capsys.readouterr()
    for more, said in (
        (["--ffn", "24"], "compress measure"), ([], "nothing is to become smaller"),
        (["--drop-layers", "7"], "the layers are 0 to 1"), (["--drop-layers", "x"], "give numbers of layers"),
        (["--drop-layers", "0,1"], "no layer is left"), (["--drop-layers", "0"], "exists"),
    ):
        assert main(["compress", "run", str(source), str(tmp_path / "b"), *more]) != 0
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_factors_are_the_nearest_of_their_rank_and_export_as_their_product(tmp_path: Path, family: str) -> None:
    """Against torch.linalg.svd of transformers' own matrices; the factored model, the merged one and the exported one
    compute the same."""
    theirs = hf.reference(hf.llama() if family == "llama" else hf.gpt2(), scale=1.0)
    source = open_weights(hf.saved(theirs, tmp_path / "theirs"))
    request = Request(factor={"output": 9, "up": 20, "qkv": 13, "down": 21})
    model, read, provenance = request.made_of(source)
    path = convert(source, model, read, tmp_path / "low", provenance=provenance, slab_bytes=3000, note=lambda _: None)
    checkpoint = open_checkpoint(path)
    assert open_weights(path).model == model and model.ranks == provenance["ranks"]
    merged = plain(checkpoint)
    assert export_hf(merged, tmp_path / "folder", weights_only=True, note=lambda text: None) is not None
    tokens = torch.randint(0, hf.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exported = hf.loaded(tmp_path / "folder")(tokens).logits
    assert hf.relative(our_logits(checkpoint.read, model, tokens), exported) <= 1e-6
    there = hf.loaded(tmp_path / "folder").state_dict()
    names = {"llama": ("model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.o_proj.weight"),
             "gpt2": ("transformer.h.1.mlp.c_proj.weight", "transformer.h.2.attn.c_proj.weight")}[family]
    for name, rank in zip(names, (21, 9)):
        u, s, v = torch.linalg.svd(theirs.state_dict()[name].double(), full_matrices=False)
        assert hf.relative(there[name], u[:, :rank] * s[:rank] @ v[:rank]) <= 1e-6
    # Scaled as the export's check scales: every factor by the root of 5.
    def scaled(name: str, kind: str, offset: Any, shape: Any, /, *, out: Any = None) -> torch.Tensor:
        values = checkpoint.read(name, kind, offset, shape)
        root = ".attention." in name or ".mlp." in name
        return values * 5**0.5 if root and name.endswith("weight") else values

    grown = our_logits(scaled, model, tokens)
    assert hf.relative(our_logits(MultipliedWeights(model, scaled), plain_model(model), tokens), grown) <= 1e-6


def test_ranks_by_energy_and_by_budget(tmp_path: Path) -> None:
    source = open_weights(saved(tmp_path / "a", LLAMA).path)
    matrices = [source.read(f"layers.{i}.mlp.down.weight", "weight", (0, 0), (32, 48)).double() for i in range(2)]
    found = Request(factor={"down": 0}, energy=0.8).made_of(source)[2]["ranks"]["down"]
    kept = [torch.linalg.svdvals(m).square() for m in matrices]
    share = [min(float(s[:r].sum() / s.sum()) for s in kept) for r in (found - 1, found)]
    assert share[0] < 0.8 <= share[1]
    model = Request(factor={}, budget=0.5).planned(LLAMA)
    for name, (rows, columns) in factored_shapes(LLAMA).items():
        rank = model.ranks[name]
        assert rank * (rows + columns) <= 0.5 * rows * columns < (rank + 1) * (rows + columns)
    assert Request(factor={"up": 0}, budget=0.5).planned(ModelConfig(hidden_size=6144)).ranks == {"up": 2432}  # 2457
    before, after = (sum(p.numel for p in model_spec(m).parameters() if "weight" in p.name and "layers" in p.name)
                     for m in (LLAMA, model))
    assert after < 0.52 * before


@pytest.mark.parametrize(("more", "said"), [
    (["--factor", "up"], "either --energy or --budget"),
    (["--factor", "up=3", "--budget", "0.5"], "give one of the two"),
    (["--factor", "up=99"], "from rank 1 to"), (["--factor", "gate=3"], "this model has qkv, output, up, down"),
    (["--factor", "up=x"], "is no rank"), (["--factor", "all", "--budget", "1.5"], "between 0 and 1"),
    (["--budget", "0.5"], "are of --factor"), (["--factor", "up=3", "--drop-layers", "0"], "the pruning first"),
    (["--share", "3"], "give 2 to 2"), (["--share", "2", "--factor", "up=3"], "make one after the other"),
])
def test_ranks_that_cannot_be_had_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    source = saved(tmp_path / "a", LLAMA).path
    assert main(["compress", "run", str(source), str(tmp_path / "b"), *more]) == 2
    assert said in capsys.readouterr().err


def test_a_factored_model_is_not_pruned_and_has_no_adapters(tmp_path: Path) -> None:
    source = open_weights(saved(tmp_path / "a", dataclasses.replace(LLAMA, up_rank=4)).path)
    with pytest.raises(ConfigError, match="prune before factoring or sharing"):
        Request(drop=(0,)).made_of(source)
    config = RunConfig(model=source.model, fine_tuning=FineTuningConfig(method="lora"))
    assert any("adapters have no matrix" in text for text in problems(config))
    wrong = RunConfig(model=dataclasses.replace(LLAMA, up_rank=40, kv_lora_rank=0))
    assert any("up to rank" in text for text in problems(wrong))


def test_factors_start_with_the_deviation_of_the_matrix() -> None:
    """Drawn factors multiply to a matrix as large as the one that they stand for."""
    model = ModelConfig(num_layers=1, hidden_size=256, num_attention_heads=4, up_rank=64)
    specs = {spec.name: spec for spec in model_spec(model).parameters()}
    low, high = (
        initial_values(seed=1, name=s.name, init=InitSpec(s.init, s.std), shape=s.shape, offset=(0, 0), extent=s.shape)
        for s in (specs["layers.0.mlp.up_low.weight"], specs["layers.0.mlp.up.weight"])
    )
    assert float((high @ low).std()) == pytest.approx(model.init_std, rel=0.05)


def test_shared_layers_export_as_copies(tmp_path: Path) -> None:
    """A transformers model whose layers are equal in groups shares them without any change, and is exported as itself;
    of others the mean is taken."""
    theirs = hf.reference(hf.llama(num_hidden_layers=5), scale=1.0)
    with torch.no_grad():
        layers = theirs.model.layers
        for index in (1, 3):
            for mine, first in zip(layers[index].parameters(), layers[index - 1].parameters()):
                mine.copy_(first)
    source = open_weights(hf.saved(theirs, tmp_path / "theirs"))
    model, read, provenance = Request(share=2).made_of(source)
    assert parameter_count(model) < 0.7 * parameter_count(source.model)
    path = convert(source, model, read, tmp_path / "shared", provenance=provenance, note=lambda text: None)
    checkpoint = open_checkpoint(path)
    assert {n.split(".")[1] for n in checkpoint.names() if n.startswith("layers.")} == {"0", "2", "4"}
    found = export_hf(plain(checkpoint), tmp_path / "folder", weights_only=True, note=lambda text: None)
    assert found is not None and found.deviation <= found.tolerance
    tokens = torch.randint(0, hf.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    same_logits(tmp_path / "folder", theirs)
    stage = stage_of(model, checkpoint.read)
    with torch.no_grad():
        ours = stage(tokens).transpose(0, 1)[..., : hf.VOCABULARY]
        assert hf.relative(ours, theirs(tokens).logits) <= 1e-6
    other = open_weights(saved(tmp_path / "b", LLAMA).path)
    model, read, _ = Request(share=2).made_of(other)
    mean = read("layers.0.mlp.up.weight", "weight", (0, 0, 0), (2, 48, 32))
    both = [other.read(f"layers.{i}.mlp.up.weight", "weight", (0, 0, 0), (2, 48, 32)) for i in range(2)]
    assert hf.relative(mean, (both[0] + both[1]) / 2) <= 1e-6


def stage_of(model: ModelConfig, read: Any) -> GPTStage:
    """The whole model in one stage, as training builds it."""
    stream = DropoutStream(0, torch.device("cpu"))
    stream.enabled = False
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single(),
        providers=torch_providers(), step=StepSlot(stream), dtype=torch.float32,
    )
    stage = GPTStage(build, start=0, stop=model.num_layers).eval()
    for parameter in stage.parameters():
        read_local(read, record_of(parameter), "weight", parameter)
    return stage
