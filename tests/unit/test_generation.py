"""Drawing tokens, cutting streams and texts into windows, and a harness task end to end where lm-eval is installed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.config.checks import problems
from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import LayoutConfig, ModelConfig, RunConfig
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.attention import SelfAttention
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder import GPTStage
from megatron_port.ext.corpora.tokenizer import ByteTokenizer
from megatron_port.run import config_hash
from megatron_port.tools.inference.cache import CacheSlot, KeyValueCache
from megatron_port.tools.inference.generation import Generator, Sampling, draw, filter_logits
from megatron_port.tools.inference.model import StreamWindows, WholeDocuments, misplaced_token
from megatron_port.tools.inference.scoring import Questions, score

LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 3.0, 0.0, 0.5]])


def test_filters_keep_the_likeliest() -> None:
    assert filter_logits(LOGITS[0], top_k=2).isinf().tolist() == [True, False, False, True]
    assert filter_logits(LOGITS, top_p=1e-9).isinf().sum(-1).tolist() == [3, 3]
    mass = torch.softmax(LOGITS[0], -1).sort(descending=True).values.cumsum(-1)
    kept = filter_logits(LOGITS, top_p=float(mass[1]) + 1e-6)[0]
    assert (~kept.isinf()).tolist() == [True, True, True, False]
    assert torch.equal(filter_logits(LOGITS), LOGITS)


def test_draws_follow_the_distribution_and_the_keys() -> None:
    """20,000 draws are within five sigma of the filtered probabilities; one at a time gives the same as a batch."""
    count = 20_000
    sampling = Sampling(temperature=0.7, top_k=3)
    keys = torch.arange(count)
    found = draw(LOGITS[:1].expand(count, 4), sampling, keys, 0)
    wanted = torch.softmax(filter_logits(LOGITS[0] / 0.7, top_k=3).double(), -1)
    shares = torch.bincount(found, minlength=4).double() / count
    assert shares[3] == 0 and bool(((shares - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt()).all())
    assert [int(draw(LOGITS[:1], sampling, keys[i : i + 1], 0)) for i in range(20)] == found[:20].tolist()
    assert draw(LOGITS[:1].expand(count, 4), sampling, keys, 1).tolist() != found.tolist()
    assert draw(LOGITS, Sampling(temperature=0.0), keys[:2], 0).tolist() == [1, 0]


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_k": -1}, {"stop_strings": ("",)}]
)
def test_senseless_sampling_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**options)


def test_a_cache_has_an_end() -> None:
    with pytest.raises(ValueError, match="position 8 of a cache of 8"):
        KeyValueCache(8).at([3, 8], torch.device("cpu"))


@pytest.mark.parametrize("mask", [
    {"sliding_window": 3}, {"attention_sinks": True, "attention_softcap": 0.5},
    {"sliding_window": 4, "attention_pattern": ("window", "full"), "attention_sinks": True},
    {"mixer_pattern": ("gated_delta", "attention"), "recurrent": RecurrentConfig(key_heads=2), "sliding_window": 3},
])
def test_a_cached_step_is_the_pass_over_everything(mask: dict[str, Any]) -> None:
    """Under windows, sinks and caps, and with a state; prompts of two lengths; each changes the logits, too."""
    model = ModelConfig(
        num_layers=2, hidden_size=24, num_attention_heads=4, num_query_groups=2, vocab_size=31, seq_length=12,
        position_embedding="rope", init_std=0.5, **mask,
    )
    stream = DropoutStream(0, torch.device("cpu"))
    stream.enabled = False
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ParallelContext.single(),
        providers=torch_providers(), step=StepSlot(stream), dtype=torch.float64,
    )
    stage, slot, draw_weights = GPTStage(build, start=0, stop=2).eval(), CacheSlot(), torch.Generator().manual_seed(0)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=draw_weights)
    tokens = torch.randint(0, 31, (2, 12), generator=draw_weights)
    with torch.no_grad():
        whole = stage(tokens).transpose(0, 1)
        slot.install(stage)
        cache = KeyValueCache(12)
        cache.lengths = torch.tensor([6, 4])
        with slot.using(cache):
            stage(tokens[:, :6])  # the second prompt has 4 tokens, the rest is padding
            for step in range(6):
                positions = [6 + step, 4 + step]
                cache.at(positions, torch.device("cpu"))
                got = stage(tokens[torch.arange(2), torch.tensor(positions)][:, None])[0]
                torch.testing.assert_close(got, whole[torch.arange(2), torch.tensor(positions)], rtol=0, atol=1e-12)
        for module in stage.modules():
            if isinstance(module, SelfAttention):
                module.spec, module.sinks = replace(module.spec, window=0, softcap=0.0), None
        assert float((stage(tokens).transpose(0, 1) - whole)[:, -1].abs().max()) > 1e-3


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(2, 90), length=st.integers(1, 20), share=st.floats(0.01, 1.0))
def test_each_token_is_predicted_once(tokens: int, length: int, share: float) -> None:
    stride = max(1, int(length * share))
    stream = np.arange(tokens)
    documents = np.flatnonzero(stream % 7 == 0)
    cut = StreamWindows(
        lambda at, n: stream[at : at + n], tokens, length, 1000, stride,
        counted=lambda at, n: stream[at : at + n] % 3 > 0,
        documents=lambda at, n: documents[(documents >= at) & (documents < at + n)] - at,
    )
    seen = []
    for window in range(len(cut)):
        found = cut.sample(window)
        assert found.counted is not None and found.starts is not None
        seen += found.tokens[1:][found.counted].tolist()
        real = found.tokens[:-1][: tokens - window * stride]
        begins = np.maximum(real // 7 * 7 - window * stride, 0)
        assert found.starts[: len(real)].tolist() == begins.tolist()
    assert seen == [t for t in range(1, tokens) if t % 3]


class Untrained:
    """What ``Questions`` needs of a model to cut texts."""

    model = ModelConfig(seq_length=6)


def test_texts_are_cut_as_the_harness_asks() -> None:
    questions = Questions(Untrained(), ByteTokenizer())  # type: ignore[arg-type]
    assert questions.pair("ab ", "c") == ([97, 98, 32, 99], 2)  # the blank belongs to what follows
    assert questions.pair("", "xyz") == ([256, *b"xyz"], 3)
    assert questions.pair("0123456789", "ab") == ([*b"56789ab"], 2)
    found = questions.windows("0123456789abcde")
    assert [(bytes(i for i in ids if i < 256), n) for ids, n in found] == [
        (b"012345", 6), (b"56789ab", 6), (b"89abcde", 3),
    ]
    assert found[0][0][0] == 256 and questions.windows("") == []
    with pytest.raises(DataError, match="at most model.seq_length"):
        score(type("M", (), {"ctx": None, "model": Untrained.model})(), [([1] * 9, 2)])  # type: ignore[arg-type]


@pytest.mark.parametrize(("wrong", "at"), [(ModelConfig().vocab_size, 2), (-1, 2), (1 << 40, 2)])
def test_a_token_outside_of_the_vocabulary_is_named_before_it_is_sent(wrong: int, at: int) -> None:
    """By place and number, in what is scored, evaluated and generated from: a GPU does not look."""
    model, ids = type("M", (), {"ctx": None, "model": Untrained.model})(), [1, 0, wrong]
    size = model.model.vocab_size
    says = f"position {at} has token {wrong}, which is outside the model's vocabulary of {size}"
    assert misplaced_token([0, size - 1], size) == "" and misplaced_token([], size) == ""
    with pytest.raises(DataError, match=f"sequence 1 to be scored: {says}"):
        score(model, [([1, 2], 1), (ids, 1)])
    with pytest.raises(ConfigError, match=f"prompt 1: {says}"):
        Generator._check(type("G", (), {"model": model, "decode": None})(), [[1], ids], Sampling())
    stream = StreamWindows(lambda start, count: np.array([1, 2, 3, 0, 1, *ids])[start : start + count], 8, 5, size)
    stream.sample(0)
    with pytest.raises(DataError, match=f"the corpus: {says.replace('position 2', 'position 7')}"):
        stream.sample(1)
    corpus = type("C", (), {"prefix": "c", "document_edges": lambda self: np.array([0, 3]),
                            "document": lambda self, index: np.array(ids)})()
    with pytest.raises(DataError, match=f"c: document 0: {says}"):
        WholeDocuments(corpus, 8, size).sample(0)


def test_rope_options_are_checked() -> None:
    def said(**changes: Any) -> str:
        run = RunConfig(engine="native", data=replace(RunConfig().data, synthetic=True))
        return " ".join(problems(replace(run, model=ModelConfig(**changes), layout=replace(run.layout, zero_stage=0))))

    rope: dict[str, Any] = {"position_embedding": "rope"}
    assert said(**rope, rotary_percent=0.25) == said(**rope, rope_scaling="linear", rope_factor=2.0) == ""
    assert 'rotary_percent = 0.5 needs position_embedding = "rope"' in said(rotary_percent=0.5)
    assert "is 5 elements; rope rotates pairs: use a multiple of 0.0625" in said(**rope, rotary_percent=0.17)
    assert "needs rope_original_length" in said(**rope, rope_scaling="llama3")
    assert "must be above rope_low_freq_factor" in said(
        **rope, rope_scaling="llama3", rope_original_length=64, rope_low_freq_factor=4.0
    )
    assert "use none, linear, llama3, yarn" in said(**rope, rope_scaling="dynamic")


def test_new_fields_leave_the_hash_of_old_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """At their defaults, fields that came later are not hashed: checkpoints from before them are of the same run."""
    hashed: list[dict[str, Any]] = []
    dumps = json.dumps

    def spy(body: Any, **options: Any) -> str:
        hashed.append(body["model"])
        return dumps(body, **options)

    monkeypatch.setattr(config_hash.json, "dumps", spy)  # type: ignore[attr-defined]
    parallel = RunConfig(model=ModelConfig(parallel_residual=True))
    assert config_hash.config_hash(RunConfig()) != config_hash.config_hash(parallel)
    assert set(hashed[0]) == set(config_hash._FIRST_MODEL) and "rope_theta" in hashed[0]
    assert set(hashed[1]) - set(config_hash._FIRST_MODEL) == {"parallel_residual"}


def test_a_task_of_the_harness(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Multiple choice, rolling log-likelihood and generation on local files, through the command."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    import hf_models as hf

    from megatron_port.cli.main import main
    from megatron_port.ext.corpora import hf_tokenizer

    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = hf.saved(hf.reference(hf.gpt2(64, vocab_size=257, eos_token_id=256)), tmp_path / "model")
    hf_tokenizer._write(folder, hf_tokenizer._byte_json(), 257)
    rows = [{"q": "one two", "choices": [" three", " cat"], "gold": 0, "text": "a b c d"} for _ in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    kinds = {
        "multiple_choice": 'doc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n',
        "loglikelihood_rolling": 'doc_to_text: ""\ndoc_to_target: "{{text}}"\n',
    }
    for kind, body in kinds.items():
        (tmp_path / f"{kind}.yaml").write_text(
            f"task: port_{kind}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
            f"output_type: {kind}\ntest_split: test\n{body}"
            f"metric_list: [{{metric: {'acc' if kind == 'multiple_choice' else 'bits_per_byte'}}}]\n"
            "metadata: {version: 1.0}\n"
        )
    tasks = ",".join(f"port_{kind}" for kind in kinds)
    out = tmp_path / "out.json"
    command = ["evaluate", str(folder), "--tasks", tasks, "--include-path", str(tmp_path), "--json", str(out)]
    assert main(command) == 0
    found = json.loads(out.read_text())["results"]
    assert found["port_multiple_choice"]["acc,none"] in (0.0, 1.0)
    assert math.isfinite(found["port_loglikelihood_rolling"]["bits_per_byte,none"])
    assert "port_multiple_choice" in capsys.readouterr().out
