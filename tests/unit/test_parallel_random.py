"""Dropout masks are a function of (seed, step, sample, op, global element), and of nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from dropped import dropped
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_port.core.dist.counter import random_bits
from megatron_port.core.dist.positions import Positions
from megatron_port.core.layers.dropout import DropoutStream, drop_threshold, keep_mask, keep_scale, op_key
from megatron_port.core.layers.step import StepSlot
from megatron_port.ext.memory.recompute import recompute

CPU = torch.device("cpu")
SEQ, WIDTH, HEADS = 12, 10, 4
IDS = (3, 17, 1 << 33, 4)


def stream(ids: tuple[int, ...] = IDS, *, seed: int = 1, step: int = 5) -> DropoutStream:
    made = DropoutStream(seed, CPU)
    made.set_micro_batch(step, ids)
    return made


def residual_mask(s: DropoutStream, *, op: str = "layers.0.mlp", p: float = 0.3, seq: int = SEQ) -> torch.Tensor:
    """[seq, batch, WIDTH] of the kept elements."""
    assert s.samples is not None
    return s.dropout(torch.ones(seq, len(s.samples.sample_ids), WIDTH), p, op=op, width=WIDTH) != 0


def probs_mask(s: DropoutStream, *, heads: int = HEADS, offset: int = 0, op: str = "probs") -> torch.Tensor:
    assert s.samples is not None
    ones = torch.ones(len(s.samples.sample_ids), heads, SEQ, SEQ)
    return dropped(s, ones, 0.3, op=op, head_offset=offset) != 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, SEQ - 1), st.integers(0, WIDTH - 1), st.data())
def test_any_slice_of_the_residual_has_its_part_of_the_mask(s0: int, w0: int, data: st.DataObject) -> None:
    """Sequence parallelism splits the rows; a split width is the same law."""
    s1, w1 = data.draw(st.integers(s0 + 1, SEQ)), data.draw(st.integers(w0 + 1, WIDTH))
    piece = stream().dropout(
        torch.ones(s1 - s0, len(IDS), w1 - w0), 0.3, op="layers.0.mlp", positions=Positions.contiguous(s1 - s0, s0),
        width_offset=w0, width=WIDTH,
    )
    assert torch.equal(piece != 0, residual_mask(stream())[s0:s1, :, w0:w1])


@pytest.mark.parametrize("tp", [2, 4])
def test_any_slice_of_the_heads_has_its_part_of_the_mask(tp: int) -> None:
    whole = probs_mask(stream())
    each = HEADS // tp
    for rank in range(tp):
        assert torch.equal(
            probs_mask(stream(), heads=each, offset=rank * each), whole[:, rank * each : (rank + 1) * each]
        )


@pytest.mark.parametrize("groups", [[(0,), (1,), (2,), (3,)], [(2, 0), (3, 1)], [(3, 2, 1, 0)]])
def test_a_sample_keeps_its_mask_in_any_micro_batch(groups: list[tuple[int, ...]]) -> None:
    residual, probs = residual_mask(stream()), probs_mask(stream())
    for group in groups:
        part = stream(tuple(IDS[i] for i in group))
        assert torch.equal(residual_mask(part), residual[:, list(group)])
        assert torch.equal(probs_mask(part), probs[list(group)])


def test_step_sample_seed_and_op_decide() -> None:
    base = residual_mask(stream(), p=0.5, seq=512)
    others = {
        "step": residual_mask(stream(step=6), p=0.5, seq=512),
        "seed": residual_mask(stream(seed=2), p=0.5, seq=512),
        "op": residual_mask(stream(), op="layers.1.mlp", p=0.5, seq=512),
        "sample": residual_mask(stream((5, 6, 7, 8)), p=0.5, seq=512),
    }
    limit = 5 * 0.5 / math.sqrt(base.numel())
    for name, other in others.items():
        assert abs(float((base == other).double().mean()) - 0.5) < limit, name
    for i in range(len(IDS)):
        for j in range(i):
            same = float((base[:, i] == base[:, j]).double().mean())
            assert abs(same - 0.5) < 2 * limit, "samples of a batch share masks"
    assert torch.equal(base, residual_mask(stream(), p=0.5, seq=512))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate_and_scale(p: float) -> None:
    x = torch.full((500, 4, 50), 2.0)
    y = stream().dropout(x, p, op="a", width=50)
    n = y.numel()
    assert abs(float((y != 0).double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 2.0 * keep_scale(p)))
    assert keep_scale(p) == pytest.approx(1 / (1 - p), abs=1e-5 / (1 - p) ** 2)
    # By position and by sample as well: no row or column is favoured.
    for dims in ((0, 1), (1, 2), (0, 2)):
        kept = (y != 0).double().mean(dims)
        assert float((kept - (1 - p)).abs().max()) < 6 * math.sqrt(p * (1 - p) * kept.numel() / n)
    probs = dropped(stream(), torch.ones(4, 5, 70, 70), p, op="a", head_offset=0)
    assert abs(float((probs != 0).double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / probs.numel())


KEYS = st.integers(-(1 << 63), (1 << 63) - 1)


@settings(max_examples=60, deadline=None)
@given(KEYS, KEYS, st.integers(1, 65535), st.integers(1, 40), st.integers(0, 1 << 40), st.data())
def test_the_mask_is_its_definition(
    key: int, key2: int, threshold: int, width: int, row: int, data: st.DataObject
) -> None:
    """Element by element, whether one hash serves four of them or not."""
    offset = data.draw(st.integers(0, width - 1))
    count = data.draw(st.integers(1, width - offset))
    got = keep_mask(torch.tensor([[key]]), key2, threshold, torch.tensor([[row], [row + 1]]), width=width,
                    offset=offset, count=count)
    assert got.shape == (2, count)
    for r in range(2):
        for c in range(count):
            position = (row + r) * width + offset + c
            bits = int(random_bits(torch.tensor(position >> 2), key, key2)) % (1 << 64)
            assert bool(got[r, c]) == ((bits >> (16 * (position % 4))) % 65536 >= threshold)


def test_masks_do_not_change_between_releases() -> None:
    """A change here changes every run with dropout; do it knowingly."""
    kept = residual_mask(stream())[:2, :2].int().tolist()
    rows = ["".join(map(str, row)) for s in kept for row in s]
    assert rows == ["0101010111", "1011011010", "1110011100", "0101100111"]
    assert op_key("layers.0.mlp") == -679541025367809779


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_fields_of_a_hash_are_independent(p: float) -> None:
    """Each of the four drops its share, and no element says anything of its neighbours."""
    t = drop_threshold(p)
    q = 1 - t / 65536
    keys, rows = stream().sample_keys(p).view(1, -1, 1), torch.arange(256).view(-1, 1, 1)
    kept = keep_mask(keys, op_key("a"), t, rows, width=256, offset=0, count=256)
    x = (kept.double() - q) / math.sqrt(q * (1 - q))  # mean 0, variance 1
    for field in range(4):
        part = x[..., field::4]
        assert abs(float(part.mean())) < 5 / math.sqrt(part.numel()), f"field {field}"
    for lag in range(1, 13):
        products = x[..., :-lag] * x[..., lag:]
        assert abs(float(products.mean())) < 5 / math.sqrt(products.numel()), f"columns {lag} apart"
    for lag in (1, 2, 4):
        products = x[:-lag] * x[lag:]
        assert abs(float(products.mean())) < 5 / math.sqrt(products.numel()), f"rows {lag} apart"
    for one in range(4):
        for other in range(one):
            products = x[..., one::4] * x[..., other::4]
            assert abs(float(products.mean())) < 5 / math.sqrt(products.numel()), f"fields {one} and {other}"


def test_the_probability_is_rounded_and_the_scale_fits_it() -> None:
    assert [drop_threshold(p) for p in (0.0, 1e-6, 2**-16, 0.1, 0.5, 0.9999999)] == [0, 0, 1, 6554, 32768, 65535]
    for p in (0.1, 0.3, 0.9999999):
        assert keep_scale(p) * (65536 - drop_threshold(p)) == pytest.approx(65536, rel=1e-15)
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=r"not in \[0, 1\)"):
            drop_threshold(p)


def test_shapes_without_data() -> None:
    s = DropoutStream(1, torch.device("meta"))
    s.set_micro_batch(0, (1, 2))
    for width in (8, 9):
        x = torch.empty(3, 2, width, device="meta")
        assert s.dropout(x, 0.5, op="a").shape == x.shape


def test_nothing_is_dropped_when_off() -> None:
    s = stream()
    x = torch.randn(SEQ, len(IDS), WIDTH)
    assert s.dropout(x, 0.0, op="a") is x
    assert DropoutStream(1, CPU).sample_keys(0.0).shape == (0,)
    s.enabled = False
    assert s.dropout(x, 0.5, op="a") is x
    probs = torch.rand(len(IDS), HEADS, SEQ, SEQ)
    assert dropped(s, probs, 0.5, op="a", head_offset=0) is probs


def test_a_forgotten_micro_batch_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before set_micro_batch"):
        DropoutStream(1, CPU).dropout(torch.ones(2, 2, 2), 0.1, op="a")


def test_use_restores_the_key() -> None:
    s = stream()
    slot = StepSlot(s)
    first = slot.state()
    mask = residual_mask(s)
    s.set_micro_batch(9, (1, 2))
    later = s.samples
    with slot.use(first):
        assert torch.equal(residual_mask(s), mask)
    assert s.samples is later
    with pytest.raises(ZeroDivisionError), slot.use(first):
        _ = 1 / 0
    assert s.samples is later


def test_recompute_sees_the_masks_of_its_forward_pass() -> None:
    """Also when the engine has moved on to another micro-batch, or to evaluation, before the backward pass."""
    s = stream()
    x = torch.randn(SEQ, len(IDS), WIDTH, dtype=torch.float64, requires_grad=True)
    calls: list[torch.Tensor] = []

    def layer(a: torch.Tensor) -> torch.Tensor:
        calls.append(a.detach())
        return s.dropout(a * a, 0.4, op="layer", width=WIDTH)

    plain = layer(x)
    (want,) = torch.autograd.grad(plain.sum(), x)
    calls.clear()
    again = recompute(layer, x, step=StepSlot(s))
    assert torch.equal(again, plain)
    s.set_micro_batch(6, (100, 101, 102, 103))
    s.enabled = False
    (got,) = torch.autograd.grad(again.sum(), x)
    assert len(calls) == 2, "the layer was not recomputed"
    assert torch.equal(got, want)
    assert s.enabled is False and s.samples is not None and s.samples.sample_ids == (100, 101, 102, 103)


def test_recompute_of_an_evaluation_pass_drops_nothing() -> None:
    s = stream()
    s.enabled = False
    x = torch.ones(SEQ, len(IDS), WIDTH, requires_grad=True)
    y = recompute(lambda a: s.dropout(a, 0.4, op="layer"), x, step=StepSlot(s))
    s.enabled = True
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, x) and torch.equal(grad, torch.ones_like(x))
