"""The network check on gloo ranks: plausible numbers, blame for what is slowed down, one group a node."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from megatron_port.core.config.loader import load
from megatron_port.core.config.schema import BackendConfig, PreflightConfig, RunConfig
from megatron_port.core.dist.rank import ProcessInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.run.build import topology_of
from megatron_port.tools.preflight import exchange, network
from megatron_port.tools.preflight import network as groups
from megatron_port.tools.preflight.exchange import gather_place
from megatron_port.tools.preflight.network import NetworkResult, Sizes, check_network, render
from megatron_port.tools.preflight.session import network_check

LIMITS = PreflightConfig(share_of_median=0.3)
SIZES = Sizes(4096, 1 << 18, 1 << 20)
CPU = torch.device("cpu")


def _check(per_node: int) -> tuple[dict[str, Any], str]:
    place = gather_place(f"n{dist.get_rank() // per_node}", CPU)
    result = check_network(place, LIMITS, SIZES)
    return result.as_json(), render(result)


def test_four_nodes_of_one_rank(ranks: RankPool) -> None:
    results = ranks.run(4, _check, 1)
    content, text = results[0]
    assert all(r == results[0] for r in results), "every rank must come to the same result"
    assert json.loads(json.dumps(content)) == content
    assert content["nodes"] == ["n0", "n1", "n2", "n3"] and content["local"] == []
    links = content["links"]
    assert links["rounds"] == 3 and len(links["pairs"]) == 6
    assert all(0.001 < p["gb"] < 100 for p in links["pairs"]), links
    rows = {(c["operation"], c["size"]): c for c in content["collectives"]}
    assert len(rows) == 4 and all(c["level"] == "all" and c["ranks"] == 4 for c in rows.values())
    big = rows["all_reduce", SIZES.large]
    assert big["algbw_gb"] == pytest.approx(SIZES.large / big["seconds"] / 1e9)
    assert big["busbw_gb"] == pytest.approx(1.5 * big["algbw_gb"]) and 0.001 < big["busbw_gb"] < 100
    gathered = rows["all_gather", SIZES.large]
    assert gathered["busbw_gb"] == pytest.approx(0.75 * gathered["algbw_gb"])
    assert "4 ranks on 4 nodes" in text and "pairs  6 of nodes in 3 rounds" in text


def test_two_nodes_of_two_ranks(ranks: RankPool) -> None:
    content, text = ranks.run(4, _check, 2)[0]
    assert content["nodes"] == ["n0", "n1"]
    assert [row["lanes"] for row in content["local"]] == [[0, 1]] and content["local"][0]["median_gb"] > 0.001
    assert {c["level"]: c["ranks"] for c in content["collectives"]} == {"node": 2, "all": 4}
    (pair,) = content["links"]["pairs"]
    assert len(pair["lanes_gb"]) == 2 and pair["gb"] == pytest.approx(sum(pair["lanes_gb"]))
    assert "slowest n" in text


def _slow(node: int, other: int | None, once: bool) -> dict[str, Any]:
    """Ranks of ``node`` hold their messages back (those to ``other`` only, or only the first time)."""
    place = gather_place(f"n{dist.get_rank()}", CPU)
    real, seen = exchange._pass, [0]

    def held(tensor: torch.Tensor, peer: int, *, send: bool) -> None:
        mine = (place.node == node and other in (None, peer)) or (place.node == other and peer == node)
        if mine and send and tensor.numel() == SIZES.message and not (once and seen[0] >= 1):
            seen[0] += 1
            time.sleep(0.15)
        real(tensor, peer, send=send)

    exchange._pass = held
    try:
        return check_network(place, LIMITS, SIZES).as_json()
    finally:
        exchange._pass = real


def test_a_slow_node_is_named(ranks: RankPool) -> None:
    content = ranks.run(4, _slow, 2, None, False)[0]
    assert list(content["bad"]) == ["n2"], content["findings"]
    (finding,) = content["findings"]
    assert finding["kind"] == "node" and finding["measured_gb"] < finding["expected_gb"]
    assert "n2 is slow with every node" in finding["text"] and content["links"]["remeasured"] >= 2


def test_a_slow_link_is_named_and_one_end_left_out(ranks: RankPool) -> None:
    content = ranks.run(4, _slow, 1, 3, False)[0]
    (finding,) = content["findings"]
    assert finding["kind"] == "link" and finding["hosts"] == ["n1", "n3"], content["findings"]
    assert len(content["bad"]) == 1 and set(content["bad"]) <= {"n1", "n3"}


def test_what_was_slow_once_is_not_blamed(ranks: RankPool) -> None:
    content = ranks.run(4, _slow, 1, 3, True)[0]
    assert content["links"]["remeasured"] >= 1 and content["findings"] == [] and content["bad"] == {}


def _groups_made(per_node: int) -> int:
    made, real = [0], dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        return real(*args, **kwargs)

    dist.new_group = counted
    try:
        check_network(gather_place(f"n{dist.get_rank() // per_node}", CPU), LIMITS, SIZES)
    finally:
        dist.new_group = real
    return made[0]


def test_a_rank_makes_one_group_at_most(ranks: RankPool) -> None:
    assert ranks.run(4, _groups_made, 1) == [0] * 4
    assert ranks.run(4, _groups_made, 2) == [1] * 4


def _hung_group(hang_at: int) -> tuple[str, int]:
    """Open three groups; the first collective of number ``hang_at`` never returns (a thread that waits)."""
    place = gather_place(f"n{dist.get_rank() // 2}", CPU)
    made, real = [0], dist.all_reduce

    def counted(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if group is not None and tensor.numel() == 1 and len(dist.get_process_group_ranks(group)) == 2:
            made[0] += 1
            if made[0] == hang_at:
                threading.Event().wait()
        return real(tensor, op, group, async_op)

    dist.all_reduce = counted
    try:
        groups.open_groups(place, 3, timeout_s=1.0)
    except EnvironmentFault as error:
        return str(error), made[0]
    finally:
        dist.all_reduce = real
    return "", made[0]


def test_as_many_groups_across_nodes_are_opened_as_the_run_will(ranks: RankPool) -> None:
    assert ranks.run(4, _hung_group, 0, fresh=True) == [("", 3)] * 4
    for text, made in ranks.run(4, _hung_group, 2, fresh=True):
        assert made == 2 and text.startswith("group 2 of 3 across nodes (n0 … n1): its first all-reduce did not return")
        assert "FI_MR_CACHE_MONITOR" in text


def test_groups_across_nodes_are_those_of_the_layout() -> None:
    """Frontier's 1T, eight ranks a node: tp stays inside; dp, pp, the tied embedding and the world span nodes."""
    config = load("runs/frontier-1t").config
    native = replace(config, engine="native")
    for run, world, expected in (
        (config, 3072, 4), (native, 3072, 5),  # gradients have a queue of their own
        (native, 3072 + 3 * 8, 5),  # three spare nodes
        (config, 24, 0),  # no replica fits
    ):
        assert groups.groups_across_nodes(run, world, 8, topology_of, two_way=True) == expected


def _unequal_world() -> NetworkResult:
    return check_network(gather_place("n0" if dist.get_rank() < 2 else "n1", CPU), LIMITS, SIZES)


def test_nodes_with_unequal_ranks_are_compared_lane_by_lane(ranks: RankPool) -> None:
    result = ranks.run(3, _unequal_world)[0]
    assert result.place.lanes == 1 and len(result.lanes) == 1 and result.collectives[-1].ranks == 3


def _failing() -> str:
    place = gather_place(f"n{dist.get_rank()}", CPU)

    def broken(*args: object, **kwargs: object) -> float:
        raise RuntimeError("[enforce fail at gloo] Connection closed by peer [10.0.0.2]:1")

    real, network.both_ways = network.both_ways, broken  # type: ignore[assignment, attr-defined]
    try:
        check_network(place, LIMITS, SIZES)
    except EnvironmentFault as error:
        return str(error)
    finally:
        network.both_ways = real  # type: ignore[attr-defined]
    return "no error"


def test_a_failed_message_names_both_hosts(ranks: RankPool) -> None:
    texts = ranks.run(2, _failing, fresh=True)
    assert texts[0].startswith("a message between n0 (rank 0) and n1 (rank 1) failed"), texts
    assert texts[1].startswith("a message between n1 (rank 1) and n0 (rank 0) failed"), texts


def _session(port: int, folder: str, limits: PreflightConfig) -> tuple[dict[str, str], list[str]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    info = ProcessInfo(rank, world, rank, world, 0, 1, "127.0.0.1", port, "test", "here")
    config = replace(RunConfig(), backend=BackendConfig(device="cpu"), preflight=limits)
    result = network_check(config, info, Path(folder), topology_of, message=1 << 18)
    return result.bad, result.faults


def test_the_command_writes_its_files(ranks: RankPool, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "bad.txt").write_text("n9\n")
    found = ranks.run(2, _session, port, str(tmp_path), LIMITS, fresh=True)
    assert found == [({}, [])] * 2
    content = json.loads((tmp_path / "network.json").read_text())
    assert content["backend"] == "gloo" and content["ranks"] == 2 and content["bad"] == {}
    assert (tmp_path / "good.txt").read_text().strip() == content["nodes"][0]
    assert (tmp_path / "bad.txt").read_text() == "n9\n"
