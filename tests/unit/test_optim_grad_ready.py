"""When buckets are full, and the pool of gradient buffers that ZeRO-2 lends them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_port.core.optim.buckets import USUAL, GradBufferPool, GradReadyTracker


def additions(uses: dict[int, int], passes: int, order: st.DataObject) -> list[int]:
    """Every parameter's gradients of a round, in a drawn order."""
    return order.draw(st.permutations([i for i, n in uses.items() for _ in range(n * passes)]))


@given(st.data())
def test_a_bucket_is_full_with_its_last_gradient_and_in_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    buckets, at = [], 0
    for number, size in enumerate(sizes):
        buckets.append((10 + number, list(range(at, at + size))))
        at += size
    uses = {i: data.draw(st.integers(0, 2)) for i in range(at)}
    grad_ready = GradReadyTracker(buckets)
    first = data.draw(st.integers(1, 3))
    grad_ready.begin(first, early=True)
    assert all(not grad_ready.added(i) for i in additions(uses, first, data)), "the first round counts"
    assert grad_ready.rest() == [n for n, _ in buckets]

    passes = data.draw(st.integers(1, 3))
    grad_ready.begin(passes, early=True)
    left = {i: n * passes for i, n in uses.items()}
    full = []
    for i in additions(uses, passes, data):
        left[i] -= 1
        new = grad_ready.added(i)
        full += new
        assert not new or left[i] == 0, "only a last gradient fills a bucket"
        # In order, and all that can be: every bucket up to the first that waits, unless that one is the first of all.
        waiting = next((k for k, (_, indices) in enumerate(buckets) if any(left[j] for j in indices)), len(buckets))
        assert full == [n for n, _ in buckets][: len(full)] and len(full) <= waiting
        assert left[i] or len(full) == waiting
    assert full + grad_ready.rest() == [n for n, _ in buckets]


def test_a_gradient_that_would_be_lost_is_an_error() -> None:
    grad_ready = GradReadyTracker([(0, [0]), (1, [1])], lambda i: f"p{i}")
    for _ in range(2):
        grad_ready.begin(1, early=True)
        grad_ready.added(0)
        grad_ready.added(1)
        assert grad_ready.rest() in ([0, 1], [])
    with pytest.raises(RuntimeError, match="p1: gradient 2 of this step, and the first step had 1"):
        grad_ready.added(1)


def test_buffers_are_reused_and_more_are_made_only_where_none_comes_back() -> None:
    grad_buffer_pool = GradBufferPool(8, torch.float32, torch.device("cpu"))
    a, b = grad_buffer_pool.acquire(8, lambda: False), grad_buffer_pool.acquire(5, lambda: False)
    assert grad_buffer_pool.made == USUAL and a.shape == (8,) and b.shape == (5,)
    given = [b]

    def free() -> bool:
        if given:
            grad_buffer_pool.release(given.pop())
            return True
        return False

    c = grad_buffer_pool.acquire(8, free)
    assert grad_buffer_pool.made == USUAL and c.data_ptr() == b.data_ptr()
    d = grad_buffer_pool.acquire(8, free)
    assert grad_buffer_pool.made == USUAL + 1
    for buffer in (a, c, d):
        grad_buffer_pool.release(buffer)
    grad_buffer_pool.trim()
    assert grad_buffer_pool.made == USUAL
