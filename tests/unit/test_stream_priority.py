"""Which communicators have streams of high priority, how that is said, and that torch is given it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_port.core.dist import groups
from megatron_port.core.dist.groups import ParallelContext, planned
from megatron_port.core.dist.mesh import Communicator, Topology
from megatron_port.run.device import FORCED, describe_policy, describe_priority, group_options, is_urgent

WHOLE = Topology(tp=2, pp=2, dp=2, cp=2, ep=4)


@pytest.mark.parametrize(("asked", "high"), [
    ("auto", {"tp", "pp", "pp_reverse", "cp", "ep"}),
    ("high", {name for c in planned(WHOLE, two_way=True) for name in c.names}),
    ("normal", set()),
])
def test_what_the_next_kernel_waits_for_comes_first(asked: str, high: set[str]) -> None:
    found = {name for c in planned(WHOLE, two_way=True) if is_urgent(c, asked) for name in c.names}
    assert found == high


def test_a_shared_communicator_is_as_urgent_as_its_most_urgent_purpose() -> None:
    (experts,) = [c for c in planned(Topology(dp=4, ep=4)) if "ep" in c.names]
    assert "dp" in experts.names and is_urgent(experts, "auto")


def test_the_start_says_what_is_high() -> None:
    said = describe_priority("auto", Topology(tp=2, pp=2, dp=2), two_way=True)
    assert said.startswith("high tp=expert_tp, pp, pp_reverse; normal dp=dp+cp=dp_shard+cp=expert_shard, embedding")
    assert said.endswith('(backend.collective_priority = "auto")')
    assert "normal" in describe_priority("normal", Topology(tp=2), two_way=True)
    assert "high" not in describe_priority("normal", Topology(tp=2), two_way=True)
    assert describe_policy("high") == "high for all groups: asked for"


def test_torchs_own_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCED, "1")
    expected = "all high: TORCH_NCCL_HIGH_PRIORITY is set"
    assert describe_priority("normal", Topology(tp=2), two_way=True) == describe_policy("normal") == expected


class FakeOptions:
    """Stand-in for ProcessGroupNCCL.Options, which a torch without NCCL lacks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


def test_every_group_gets_options_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nccl:
        Options = FakeOptions

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    made = group_options("auto", "nccl", 1800.0)
    urgent, other = Communicator(("tp",), ((0, 1),)), Communicator(("dp",), ((0, 2),))
    first, second = made(urgent), made(urgent)
    assert first.is_high_priority_stream and second.is_high_priority_stream and first is not second
    assert not made(other).is_high_priority_stream
    assert first._timeout == timedelta(minutes=30)  # as the group's: torch warns of another on every rank
    assert group_options("high", "gloo", 1800.0)(urgent) is None


@pytest.fixture
def one_of_eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, object]]]:
    """Rank 5 of 8, whose groups are only noted: (description, options)."""
    noted: list[tuple[str, object]] = []

    def new_group(members: list[int], *, group_desc: str, pg_options: object, **_: object) -> object:
        if 5 in members:
            noted.append((group_desc, pg_options))
        else:
            assert pg_options is None
        return object()

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(groups.ParallelContext, "_warm_up", lambda *_: None)
    yield noted


def test_the_groups_of_a_rank_are_made_with_their_options(one_of_eight: list[tuple[str, object]]) -> None:
    ParallelContext.create(Topology(tp=2, pp=2, dp=2), "cpu", "nccl",
                           options=lambda c: is_urgent(c, "auto"))
    assert dict(one_of_eight) == {
        "tp": True, "dp": False, "pp": True, "embedding": False, "pp_reverse": True, "world": False,
    }
