"""The rank pool itself: collectives work, failures are named, a hung or dead world is replaced."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from pool import RankFailed, RankPool

from megatron_port.core.errors import EnvironmentFault


def _sum_of_ranks(scale: float) -> tuple[float, int, int]:
    value = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item(), os.getpid(), torch.get_num_threads()


def _raise_on(bad: int) -> None:
    print("a line for the log", flush=True)
    if dist.get_rank() == bad:
        raise EnvironmentFault("the link is down")
    dist.barrier()  # never completed by all


def _hang() -> None:
    if dist.get_rank() == 1:
        threading.Event().wait()


def _die() -> None:
    if dist.get_rank() == 0:
        os._exit(9)


def _count_calls() -> int:
    calls = getattr(dist, "calls_in_this_process", 0) + 1
    dist.calls_in_this_process = calls  # type: ignore[attr-defined]
    return calls


def _backward(x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (x @ x.T).sum().backward()
    assert x.grad is not None
    dist.all_reduce(x.grad)
    return x.grad


def _deepspeed_world() -> tuple[int, bool]:
    import sys

    loaded = "deepspeed" in sys.modules
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    value = torch.ones(1)
    deepspeed.comm.all_reduce(value)
    return int(value.item()), loaded


@pytest.mark.parametrize("size", [1, 2, 4])
def test_collective_sees_every_rank(ranks: RankPool, size: int) -> None:
    results = ranks.run(size, _sum_of_ranks, 0.5)
    assert [r[0] for r in results] == [0.5 * size * (size + 1) / 2] * size
    assert len({r[1] for r in results}) == size
    assert {r[2] for r in results} == {1}


def test_autograd_runs_in_forked_ranks(ranks: RankPool) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    grads = ranks.run(2, _backward, x)
    expected = 2 * 2 * x.sum(0).expand(2, 3)
    assert all(torch.equal(g, expected) for g in grads)


def test_ranks_stay_alive_and_fresh_ones_do_not(ranks: RankPool) -> None:
    first = ranks.run(2, _count_calls)
    assert ranks.run(2, _count_calls) == [n + 1 for n in first]
    assert ranks.run(2, _count_calls, fresh=True) == [1, 1]
    assert ranks.run(2, _count_calls) == [n + 2 for n in first]


def test_exception_is_raised_with_rank_trace_and_log(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2: EnvironmentFault: the link is down") as caught:
        ranks.run(2, _raise_on, 1)
    assert caught.value.rank == 1
    assert "in _raise_on" in str(caught.value) and "a line for the log" in str(caught.value)
    assert isinstance(caught.value.__cause__, EnvironmentFault)
    assert ranks.run(2, _sum_of_ranks, 1.0)[0][0] == 3.0


def test_timeout_names_the_ranks_and_the_next_test_works(ranks: RankPool) -> None:
    before = {r[1] for r in ranks.run(2, _sum_of_ranks, 1.0)}
    with pytest.raises(RankFailed, match=r"ranks \[1\] of 2 did not finish within 0.5 s"):
        ranks.run(2, _hang, timeout=0.5)
    after = ranks.run(2, _sum_of_ranks, 1.0)
    assert after[0][0] == 3.0 and not before & {r[1] for r in after}
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_dead_rank_is_noticed(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="rank 0 of 2: Died"):
        ranks.run(2, _die)
    assert ranks.run(2, _sum_of_ranks, 1.0)[1][0] == 3.0


def test_local_functions_are_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="module-level"):
        ranks.run(1, lambda: None)


def test_deepspeed_ranks(ranks: RankPool) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    assert ranks.run(2, _deepspeed_world, deepspeed=True) == [(2, True), (2, True)]
