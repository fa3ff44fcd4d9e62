"""Micro-batches: the indexing law, resumption, masks, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_port.core.config.schema import BatchConfig, DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_port.core.data.dataset import GPTDataset, SyntheticDataset
from megatron_port.core.data.indexed import CorpusMeta, IndexedDataset
from megatron_port.core.data.loader import RankView, ReplicaShare, StepLoader, build_loaders
from megatron_port.core.dist.positions import SequencePartition
from megatron_port.core.errors import DataError
from megatron_port.ext.context.division import divide
from megatron_port.ext.corpora.index_cache import IndexCache
from megatron_port.ext.corpora.packing import PackedDataset
from megatron_port.ext.corpora.writer import IndexedWriter


def corpus(path, documents=40, length=25, vocab=257, tokenizer="byte", eod=256, seed=0, meta=True):
    random = np.random.default_rng(seed)
    with IndexedWriter(path, vocab_size=vocab) as writer:
        for _ in range(documents):
            writer.add_document([*random.integers(0, vocab - 1, length - 1), vocab - 1])
        if meta:
            writer.describe(CorpusMeta(tokenizer=tokenizer, vocab_size=vocab, eod_id=eod))
    return str(path)


def run_config(*prefixes, order="stateless", seed=11, **data):
    return RunConfig(
        seed=seed, model=ModelConfig(seq_length=8, vocab_size=257),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=8), training=TrainingConfig(steps=40, eval_batches=2),
        data=DataConfig(**{"train": prefixes, "split": (0.8, 0.1, 0.1), "order": order, **data}))


def loaders(run, dp_rank=0, dp_size=1, tokens=True, labels=True):
    return build_loaders(run, dp_rank=dp_rank, dp_size=dp_size, need_tokens=tokens, need_labels=labels)


def rows(batches):
    return {k: torch.cat([b.tokens[i], b.labels[i, -1:]]).tolist() for b in batches for i, k in enumerate(b.sample_ids)}


@pytest.fixture
def setup(tmp_path, request):
    order = getattr(request, "param", "stateless")
    prefixes = [corpus(tmp_path / "a"), corpus(tmp_path / "b", documents=20, seed=1)]
    run = run_config(*prefixes, order=order)
    return replace(run, output_dir=str(tmp_path / "out"))


BOTH = pytest.mark.parametrize("setup", ["stateless", "megatron"], indirect=True)


@BOTH
def test_indexing_law_and_freedom_from_layout(setup):
    whole = rows(loaders(setup).train.step(16, 8))
    assert sorted(whole) == list(range(16, 24))
    for size in (2, 4):
        for b in (1, 2):
            if 8 % (b * size):
                continue
            run = replace(setup, batch=replace(setup.batch, micro_batch_size=b))
            union = {}
            for rank in range(size):
                step = loaders(run, rank, size).train.step(16, 8)
                for m, batch in enumerate(step):
                    assert batch.sample_ids == tuple(16 + (m * size + rank) * b + i for i in range(b))
                    assert batch.tokens.shape == (b, 8) and batch.tokens.dtype == torch.int64
                union.update(rows(step))
            assert union == whole


@BOTH
def test_resume_is_exact(setup):
    reference = [rows(loaders(setup).train.step(8 * step, 8)) for step in range(40)]
    for at in (0, 1, 13, 25, 39):
        fresh = loaders(setup)
        assert [rows(fresh.train.step(8 * step, 8)) for step in range(at, 40)] == reference[at:]


def test_batches_of_any_size_draw_the_same_stream(setup):
    train = loaders(setup).train
    ramped = {**rows(train.step(0, 2)), **rows(train.step(2, 6)), **rows(train.step(8, 8))}
    assert ramped == rows(train.step(0, 16))


@BOTH
def test_labels_are_the_next_tokens(setup):
    batch = loaders(setup).train.step(0, 8)[0]
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1]) and batch.loss_mask is None


def test_epoch_visits_each_sample_once(tmp_path):
    data = IndexedDataset(corpus(tmp_path / "a"))
    dataset = GPTDataset(data, seq_length=8, vocab_size=257)
    made = [rows(StepLoader(dataset, ReplicaShare(1), seq_length=8, seed=seed,
                            view=RankView(True, True)).step(first, len(dataset)))
            for seed, first in ((1, 0), (1, len(dataset)), (2, 0))]
    stored = sorted(dataset.sample(i).tokens.tolist() for i in range(len(dataset)))
    orders = [list(m.values()) for m in made]
    assert all(sorted(o) == stored for o in orders)
    assert orders[0] != orders[1] and orders[0] != orders[2]


def test_eod_mask(setup):
    run = replace(setup, data=replace(setup.data, mask_eod_loss=True))
    seen = 0
    for batch in loaders(run).train.step(0, 40):
        assert batch.loss_mask.dtype == torch.float32
        assert torch.equal(batch.loss_mask == 0, batch.tokens == 256)
        seen += int((batch.tokens == 256).sum())
    assert seen > 0
    assert loaders(run, labels=False).train.step(0, 8)[0].loss_mask is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_two_runs_of_positions_gets_their_tokens_labels_and_masks(setup, rank):
    run = replace(setup, data=replace(setup.data, mask_eod_loss=True))
    partition = SequencePartition(divide(2, "zigzag"), rank)
    at = partition.held(8).index(torch.device("cpu"))
    assert at.tolist() == ([0, 1, 6, 7], [2, 3, 4, 5])[rank]
    part = build_loaders(run, dp_rank=0, dp_size=1, need_tokens=True, need_labels=True, partition=partition)
    for whole, mine in zip(loaders(run).train.step(0, 8), part.train.step(0, 8), strict=True):
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(getattr(mine, name), getattr(whole, name)[:, at])
    assert part.valid is not None
    last = list(part.valid.eval_batches(10**6, 10**6))[-1][-1]
    assert last.loss_mask is not None and last.labels is not None
    assert last.loss_mask.shape == last.labels.shape == (2, 4)


def test_stages_get_only_what_they_need(setup, monkeypatch):
    first = loaders(setup, labels=False).train.step(0, 8)[0]
    last = loaders(setup, tokens=False).train.step(0, 8)[0]
    assert first.labels is None and last.tokens is None
    assert torch.equal(first.tokens[:, 1:], last.labels[:, :-1])
    for masking in (True, False):  # every stage takes part in counting tokens, and only the last sees the mask
        run = replace(setup, data=replace(setup.data, mask_eod_loss=masking))
        for tokens, labels in ((True, False), (False, False), (False, True)):
            batch = loaders(run, tokens=tokens, labels=labels).train.step(0, 8)[0]
            assert batch.masked is masking and (batch.loss_mask is not None) is (masking and labels)

    def refuse(*_):
        raise AssertionError("a middle stage read tokens")

    monkeypatch.setattr(IndexedDataset, "read", refuse)
    for order in ("stateless", "megatron"):
        run = replace(setup, data=replace(setup.data, order=order))
        middle = loaders(run, tokens=False, labels=False)
        batch = middle.train.step(24, 8)[1]
        assert batch.tokens is None and batch.labels is None and batch.sample_ids == (26, 27)
        assert len(list(middle.eval_batches("valid", 1, 4))) == 1


def counted(batches):
    """Sample number → its tokens that count, of micro-batches; a sample of which none counts is left out."""
    out = {}
    for b in batches:
        mask = torch.ones(b.tokens.shape) if b.loss_mask is None else b.loss_mask
        for i, k in enumerate(b.sample_ids):
            if mask[i].any():
                assert k not in out
                out[k] = b.labels[i][mask[i].bool()].tolist()
    return out


@BOTH
def test_evaluation_counts_every_sample_once_whatever_the_batch(setup):
    size = len(loaders(setup).valid.dataset)
    stored = {k: loaders(setup).valid.dataset.sample(k).tokens[1:].tolist() for k in range(size)}
    for micro, dp, whole in ((1, 1, 1), (2, 1, 4), (2, 2, 4), (1, 3, 6), (4, 1, 12), (2, 3, 6), (4, 2, 8 * (size + 8))):
        run = replace(setup, batch=replace(setup.batch, micro_batch_size=micro))
        replicas = [list(loaders(run, rank, dp).valid.eval_batches(10**6, whole)) for rank in range(dp)]
        assert counted(b for batches in replicas for step in batches for b in step) == stored
        assert {len(batches) for batches in replicas} == {-(-size // whole)}
        for steps in zip(*replicas):  # the same schedule on all replicas, and a mask on all or none
            assert len({len(step) for step in steps}) == 1
            assert len({b.loss_mask is None for step in steps for b in step}) == 1
        some = [b for batches in replicas for step in batches[:2] for b in step]
        assert counted(some) == {k: stored[k] for k in range(min(2 * whole, size))}


def test_evaluation_masks_the_end_of_documents_in_the_last_batch_too(setup):
    run = replace(setup, data=replace(setup.data, mask_eod_loss=True))
    valid = loaders(run).valid
    size, batches = len(valid.dataset), list(valid.eval_batches(10**6, 10**6))
    stored = [torch.from_numpy(valid.dataset.sample(k).tokens) for k in range(size)]
    assert len(batches) == 1 and any((s == 256).any() for s in stored)
    assert counted(batches[0]) == {k: s[1:][s[:-1] != 256].tolist() for k, s in enumerate(stored)}


def test_train_and_validation_share_no_token_range(tmp_path):
    with IndexedWriter(tmp_path / "a", vocab_size=60000) as writer:
        for i in range(50):
            writer.add_document(np.arange(100 * i, 100 * i + 100))
    for order in ("stateless", "megatron"):
        run = run_config(str(tmp_path / "a"), order=order)
        run = replace(run, model=replace(run.model, vocab_size=60000), output_dir=str(tmp_path / "out"))
        made = loaders(run)
        drawn = [t for row in rows(made.train.step(0, 320)).values() for t in row]
        held = [t for s in made.valid.eval_batches(1000, 2) for row in rows(s).values() for t in row]
        assert max(drawn) < 4000 <= min(held) and max(held) < 4500


def test_megatron_order_ends_with_a_message(setup):
    run = replace(setup, data=replace(setup.data, order="megatron"))
    with pytest.raises(DataError, match="320"):
        loaders(run).train.step(320, 8)


def test_synthetic_needs_no_files():
    run = run_config(synthetic=True)
    made = loaders(run)
    assert made.tokenizer_name is None and isinstance(made.train.dataset, SyntheticDataset)
    train, valid = rows(made.train.step(0, 8)), rows(next(made.eval_batches("valid", 1, 8)))
    assert train == rows(loaders(run).train.step(0, 8)) and list(train.values()) != list(valid.values())
    assert rows(loaders(replace(run, seed=12)).train.step(0, 8)) != train


def test_sidecar_rules(tmp_path):
    byte = corpus(tmp_path / "a")
    assert loaders(run_config(byte)).tokenizer_name == "byte" and loaders(run_config(byte)).eod_id == 256
    with pytest.raises(DataError, match=r"data\.tokenizer is gpt2"):
        loaders(run_config(byte, tokenizer="gpt2"))
    other = corpus(tmp_path / "b", tokenizer="gpt2", eod=255)
    with pytest.raises(DataError, match="different tokenizers"):
        loaders(run_config(byte, other))
    large = corpus(tmp_path / "c", vocab=500)
    with pytest.raises(DataError, match="model.vocab_size = 500"):
        loaders(run_config(large))
    bare = corpus(tmp_path / "d", meta=False)
    assert loaders(run_config(bare)).tokenizer_name is None
    assert loaders(run_config(bare, tokenizer="byte")).eod_id == 256
    with pytest.raises(DataError, match="mask_eod_loss"):
        loaders(run_config(bare, mask_eod_loss=True))


@pytest.mark.parametrize("order", ["stateless", "megatron"])
def test_refusals_carry_numbers(tmp_path, order):
    with pytest.raises(DataError, match=r"data\.train is empty"):
        loaders(run_config(order=order))
    tiny = corpus(tmp_path / "tiny", documents=1, length=5)
    with pytest.raises(DataError, match=r"tiny: [45] tokens .* = 9"):
        loaders(run_config(tiny, order=order))
    fine = corpus(tmp_path / "fine")
    with pytest.raises(DataError, match="2 weights for 1"):
        loaders(run_config(fine, weights=(1.0, 2.0), order=order))
    with pytest.raises(DataError, match="leaves validation without"):
        loaders(run_config(fine, split=(1.0, 0.0, 0.0), order=order))
    with pytest.raises(DataError, match="multiple of 6"):
        loaders(run_config(fine, order=order), 0, 3).train.step(0, 8)


def test_the_training_blend_uses_the_training_weights(tmp_path):
    """The order is built at the first sample; by then the other splits, with other shares, have been set up."""
    from megatron_port.ext.corpora import megatron_order as mo

    # Documents of very different lengths: the corpora's shares differ from split to split.
    long_first = [200] * 30 + [12] * 10
    prefixes = []
    for name, lengths in (("a", long_first), ("b", [12] * 30 + [200] * 10)):
        path = tmp_path / name
        with IndexedWriter(path, vocab_size=257) as writer:
            for n in lengths:
                writer.add_document([1] * n)
            writer.describe(CorpusMeta(tokenizer="byte", vocab_size=257, eod_id=256))
        prefixes.append(str(path))
    run = replace(run_config(*prefixes, order="megatron"), output_dir=str(tmp_path / "out"))
    dataset = loaders(run).train.dataset
    total = run.training.steps * run.batch.global_batch_size
    splits = [mo.split_ranges(run.data.split, 40)[0]] * 2
    tokens = []
    for prefix, (first, end) in zip(prefixes, splits):
        data = IndexedDataset(prefix)
        tokens.append(float(data.sequence_start(end) - data.sequence_start(first)))
    expected = mo.build_blend(tokens, total)
    made = dataset._order()
    assert np.array_equal(made[0], expected[0]) and np.array_equal(made[1], expected[1])


@BOTH
def test_labels_count_as_the_corpus_says(setup, tmp_path):
    """Whether a token counts is a function of its id here: in both orders, on every stage, beside a corpus without a
    mask, and of evaluation too."""
    with IndexedWriter(tmp_path / "m", vocab_size=257, masked=True) as writer:
        random = np.random.default_rng(2)
        for length in random.integers(1, 40, 60):
            ids = random.integers(0, 128, length)
            writer.add_block(np.array([length], "<i4"), ids.astype("<u2").tobytes(), (ids % 2 == 0).tobytes())
        writer.describe(CorpusMeta(tokenizer="byte", vocab_size=257, eod_id=256))
    with IndexedWriter(tmp_path / "u", vocab_size=257) as writer:
        writer.add_document(random.integers(128, 256, 700))
        writer.describe(CorpusMeta(tokenizer="byte", vocab_size=257, eod_id=256))
    run = replace(setup, data=replace(setup.data, train=(str(tmp_path / "m"), str(tmp_path / "u"))))
    made = loaders(run)
    batches = [b for step in range(20) for b in made.train.step(8 * step, 8)]
    size = len(made.valid.dataset)
    batches += [b for group in made.valid.eval_batches(100, 8) for b in group if b.sample_ids[-1] < size]
    assert len(batches) > 80
    for b in batches:
        assert torch.equal(b.loss_mask == 1, (b.labels % 2 == 0) | (b.labels >= 128))
    assert 0.3 < float(torch.cat([b.loss_mask for b in batches]).mean()) < 0.95
    assert loaders(run, tokens=False, labels=False).train.step(0, 8)[0].masked
    half = loaders(run, dp_rank=1, dp_size=2).train.step(8, 8)[0]
    assert torch.equal(half.loss_mask, torch.cat([b.loss_mask for b in made.train.step(8, 8)])[2:4])
    data = IndexedDataset(tmp_path / "m")
    packed = PackedDataset(data, first=0, end=60, seq_length=64, vocab_size=257, cache=IndexCache(tmp_path / "packed"))
    samples = [packed.sample(k) for k in range(len(packed))]
    counted = np.concatenate([s.tokens[1:][s.counted] for s in samples])
    assert not (counted % 2).any()
    assert len(counted) == sum(int((data.document(i)[1:] % 2 == 0).sum()) for i in range(60))
