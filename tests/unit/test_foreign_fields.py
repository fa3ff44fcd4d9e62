"""Fields of a config.json: what transformers reads of them, and how it resolves those that contradict one another."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import hf_models as hf
import pytest
import torch

from megatron_port.core.config.schema import ModelConfig
from megatron_port.core.errors import CheckpointError
from megatron_port.core.model.rotary import frequencies, turning_factor
from megatron_port.ext.families import family_named, family_names
from megatron_port.ext.families.family import FILE, HARMLESS, known_fields
from megatron_port.tools.interop.hf_config import model_from_hf

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- what is read


def built(family: str, config: Any) -> Any:
    """transformers' language model of a configuration."""
    torch.manual_seed(0)
    kind = getattr(transformers, family_named(family).architecture)
    return kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(40).view(2, 20), use_cache=False).logits
    return found


def small_body(family: str) -> dict[str, Any]:
    def without_tags(table: dict[str, Any]) -> Any:
        return math.inf if table.get("__float__") == "Infinity" else table

    return json.loads(hf.small(family).to_json_string(use_diff=False), object_hook=without_tags)


@pytest.mark.parametrize("family", family_names())
def test_all_that_transformers_reads_is_known(family: str) -> None:
    """By watching its model being made and run. A field of this list is never left out."""
    known, seen = known_fields(family), set[str]()
    config = hf.small(family)
    config._experts_implementation = "eager"
    kind = type(config)

    class Watched(kind):  # type: ignore[valid-type,misc]
        def __getattribute__(self, name: str) -> Any:
            seen.add(name)
            return super().__getattribute__(name)

    assert known is not None and known.version
    config.__class__ = Watched
    logits(built(family, config))
    # What a call returns, with what kind of input, and on how many devices.
    apart = ("_", "output_", "vision_", "base_model_", "is_encoder_decoder")
    fields = {name for name in seen if not name.startswith(apart) and not callable(getattr(kind, name, None))}
    assert len(fields) > 15 and not fields - known.read, sorted(fields - known.read)


READ_AND_HARMLESS = {  # labels, tokens with a meaning, what is returned, dropout, auxiliary losses, memory
    "_commit_hash", "_name_or_path", "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id",
    "gradient_checkpointing", "id2label", "label2id", "model_type", "num_labels", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id", "torch_dtype", "use_cache",
    "embd_pdrop", "reorder_and_upcast_attn", "output_router_logits", "router_aux_loss_coef",
    "original_max_position_embeddings",  # Phi-3's, of longrope alone
    "_sliding_window_pattern",  # Gemma 3's, written over before it is read
    # Mamba-2's: initial values, rounding, what a call returns
    "time_step_rank", "time_step_floor", "time_step_min", "time_step_max", "rescale_prenorm_residual",
    "residual_in_fp32", "num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient",
    # OLMo Hybrid's: initial values
    "linear_dt_min", "linear_dt_max", "linear_dt_init_floor", "linear_a_log_min", "linear_a_log_max",
}


@pytest.mark.parametrize("family", family_names())
def test_what_is_left_out_changes_nothing(family: str) -> None:
    """All fields at once that we call harmless, or that the family's class has and its model does not read: other
    values, equal logits."""
    known, body = known_fields(family), small_body(family)
    assert known is not None
    assert not {*HARMLESS, *family_named(family).harmless} & known.read - READ_AND_HARMLESS
    what_it_is = {  # not values of a model: its class, its dtype, its labels
        "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "problem_type",
        "id2label", "label2id", "num_labels", "attn_implementation", "return_dict", "_attn_implementation_autoset",
        "base_config_key", "is_encoder_decoder", "cache_implementation", "summary_activation",
    }
    left = {name for name in {*known.defaults, *body} if name not in known.read}
    names = {*HARMLESS, *family_named(family).harmless, *left, "is_llama_config", "use_mrope"} - what_it_is
    other: dict[str, Any] = {name: other_value(body.get(name, known.defaults.get(name))) for name in names}
    other |= {name: 3 for name in names if name.endswith("_token_id")}
    kind = type(hf.small(family))
    changed = kind(**{**body, **other})
    changed._experts_implementation = "eager"
    plain = kind(**body)
    plain._experts_implementation = "eager"
    model = built(family, plain)
    twin = built(family, changed)
    twin.load_state_dict(model.state_dict())
    assert len(names) > 40 and torch.equal(logits(model), logits(twin))


def other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else 3 if value is None else value




def test_the_list_is_what_this_transformers_reads() -> None:
    """The script, run again, gives the committed file."""
    if transformers.__version__ != json.loads(FILE.read_text())["transformers"]:
        pytest.skip(f"the list is of another transformers than {transformers.__version__}")
    found = importlib.util.spec_from_file_location("transformers_fields", ROOT / "scripts" / "transformers_fields.py")
    assert found is not None and found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    assert script.text_of(script.derived()) == FILE.read_text()


# ---------------------------------------------------------------- rope, resolved as there

BODY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 11,
    "intermediate_size": 16, "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
TABLES: list[dict[str, Any] | None] = [
    None, {}, {"rope_type": "default", "rope_theta": 500.0}, {"type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0, "attention_factor": 3.0, "original_max_position_embeddings": 8},
    {"rope_type": "linear"}, {"rope_type": "linear", "factor": None}, {"type": "yarn", "rope_type": "default"},
    LLAMA3, {**LLAMA3, "low_freq_factor": None}, {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"},
    {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
    YARN, {**YARN, "rope_theta": 300.0}, {"type": "yarn", "factor": 4.0}, {**YARN, "factor": None},
    {**YARN, "beta_fast": 0, "beta_slow": None}, {**YARN, "beta_slow": 0, "beta_fast": 8}, {**YARN, "truncate": None},
    {**YARN, "truncate": False}, {**YARN, "attention_factor": None}, {**YARN, "attention_factor": 1.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, {**YARN, "mscale": 0.7}, {**YARN, "mscale": 0, "mscale_all_dim": 1},
    {**YARN, "original_max_position_embeddings": None}, {**YARN, "finetuned": True}, {**YARN, "factor": 1.0},
    {**YARN, "beta_fast": 1.5, "beta_slow": 1.4, "original_max_position_embeddings": 7},
]
OURS = (  # computed by transformers with a warning, or to nothing; refused here
    {**YARN, "attention_factor": 0}, {**YARN, "attention_factor": 0.0}, {**YARN, "factor": 0.5}, {**YARN, "factor": 0},
    {**YARN, "beta_fast": 1, "beta_slow": 2}, {**YARN, "beta_fast": -1}, {"rope_type": "dynamic", "factor": 2.0},
    {**YARN, "factor": "4"}, {**YARN, "factor": True}, {**LLAMA3, "high_freq_factor": 1.0}, {"rope_type": "su"},
    {"rope_type": "linear", "factor": 0}, {**YARN, "original_max_position_embeddings": 0}, {"rope_type": "linear",
                                                                                          "factor": float("inf")},
)
BESIDE: list[dict[str, Any]] = [
    {}, {"rope_theta": 20000.0}, {"original_max_position_embeddings": 32},
    {"original_max_position_embeddings": 32, "rope_theta": 1000},
]


def theirs_of(body: dict[str, Any]) -> tuple[torch.Tensor, float] | None:
    """transformers' frequencies and the factor on queries and keys; None: it fails."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        made = LlamaRotaryEmbedding(transformers.LlamaConfig(**json.loads(json.dumps(body))))
    except Exception:  # whatever it raises
        return None
    return made.inv_freq, float(made.attention_scaling)


def ours_of(body: dict[str, Any], notes: list[str]) -> ModelConfig | None:
    try:
        return model_from_hf(body, "config.json", notes)
    except CheckpointError:
        return None


@pytest.mark.parametrize("beside", BESIDE)
def test_rope_is_resolved_as_transformers_does(beside: dict[str, Any]) -> None:
    """Every pair of tables, with fields beside them: the same frequencies, or both fail. A contradiction is noted."""
    computed = 0
    for scaling, parameters in itertools.product(TABLES, TABLES[::6]):
        body = {**BODY, **beside, "rope_scaling": scaling, "rope_parameters": parameters}
        body = {name: value for name, value in body.items() if name in BODY or value is not None}
        notes: list[str] = []
        theirs, model = theirs_of(body), ours_of(body, notes)
        assert (theirs is None) == (model is None), body
        if theirs is None or model is None:
            continue
        computed += 1
        assert torch.allclose(frequencies(model, "cpu"), theirs[0], rtol=1e-6, atol=0), body
        assert turning_factor(model) == pytest.approx(theirs[1], rel=1e-9), body
        differ = bool(scaling and parameters and scaling != parameters)
        assert differ == any("rope_scaling is read" in note for note in notes), body
    assert computed > 60


def test_rope_that_makes_no_sense_is_refused() -> None:
    for table in OURS:
        with pytest.raises(CheckpointError, match=r"config.json.*(expected|above|only default)"):
            model_from_hf({**BODY, "rope_scaling": table}, "config.json")
    with pytest.raises(CheckpointError, match=r"unknown field factor \(4.0\): rope_type default does not read it"):
        model_from_hf({**BODY, "rope_scaling": {"rope_type": "default", "factor": 4.0}}, "config.json")


def test_a_length_beside_the_table_is_noted() -> None:
    notes: list[str] = []
    body = {**BODY, "rope_scaling": YARN, "original_max_position_embeddings": 32}
    assert model_from_hf(body, "config.json", notes).rope_original_length == 32
    assert "is 64 in the rope table and 32 beside it; the latter is read" in notes[0]


def test_a_null_is_no_default(tmp_path: Path) -> None:
    """Where the two differ in transformers: Qwen's groups are its heads then; other fields are refused."""
    qwen = {**BODY, "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": None}
    assert model_from_hf(qwen, "config.json").kv_heads == 4
    v3 = small_body("deepseek_v3")
    for name in ("norm_topk_prob", "n_group", "rope_interleave"):
        with pytest.raises(CheckpointError, match=f"{name} is null, which is not its default"):
            model_from_hf({**v3, name: None}, "config.json")
