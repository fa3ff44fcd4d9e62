"""The ghost machine's analysis finds planted faults in logs of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "ghost"))

import budgets
import expert_waits
import faults as planted
import recorded
from analyse import faults, meeting_faults, operation_faults, stream_priorities
from combinations import Case
from machine import Event, RankLog
from ordering import race_faults, wait_faults, waits_between

Lines = list[str]


def logs(*ranks: Lines) -> list[RankLog]:
    """``kind detail`` lines of each rank."""
    out = []
    for rank, lines in enumerate(ranks):
        events = []
        for line in lines:
            kind, _, detail = line.partition("|")
            events.append(Event(kind, "0", detail))
        out.append(RankLog(rank, events))
    return out


def batch(*operations: str) -> Lines:
    """Operations of one NCCL group."""
    return ["nccl group|begins", *(f"nccl|{op} 1" for op in operations), "nccl group|ends"]


def pipeline(rank: int) -> Lines:
    """Two stages: activations on ``a``, gradients on ``g``, a sum over both."""
    peer = 1 - rank
    start = [f"communicator begins|{name} 2 {rank}" for name in "ag"]
    forward = batch(f"a {rank} {'send' if rank == 0 else 'receive'} 64 9 {peer}")
    backward = batch(f"g {rank} {'receive' if rank == 0 else 'send'} 64 9 {peer}")
    return [*start, *forward, *forward, *backward, *backward, f"nccl|a {rank} all_reduce 1 7 -1 0"]


def test_a_right_step_has_no_faults() -> None:
    assert faults(logs(pipeline(0), pipeline(1))) == []


def swapped_groups(lines: Lines) -> Lines:
    return [lines[1], lines[0], *lines[2:]]


def without_a_send(lines: Lines) -> Lines:
    return lines[:2] + lines[5:]


def other_size(lines: Lines) -> Lines:
    return [line.replace("send 64", "send 32") for line in lines]


def other_dtype(lines: Lines) -> Lines:
    return [line.replace("all_reduce 1 7", "all_reduce 1 9") for line in lines]


def sum_before_messages(lines: Lines) -> Lines:
    return [*lines[:2], lines[-1], *lines[2:-1]]


@pytest.mark.parametrize(("change", "says"), [
    (swapped_groups, "waits for ever in the communicator"),
    (without_a_send, "receive of 64 (dtype 9) from 0 is never answered"),
    (other_size, "send of 32 (dtype 9) to 1 is never answered"),
    (other_dtype, "all_reduce of 1 (dtype 9) is never answered"),
    (sum_before_messages, "all_reduce of 1 (dtype 7) is never answered"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_found(change: Callable[[Lines], Lines], says: str) -> None:
    found = faults(logs(change(pipeline(0)), pipeline(1)))
    assert found and says in " ".join(found)


def test_messages_of_one_batch_may_cross() -> None:
    both = [batch(f"a {r} send 8 9 {1 - r}", f"a {r} receive 8 9 {1 - r}") for r in (0, 1)]
    start = [[f"communicator begins|a 2 {r}"] for r in (0, 1)]
    assert operation_faults(logs(start[0] + both[0], start[1] + both[1])) == []
    one_by_one = [batch(f"a {r} send 8 9 {1 - r}") + batch(f"a {r} receive 8 9 {1 - r}") for r in (0, 1)]
    assert len(operation_faults(logs(start[0] + one_by_one[0], start[1] + one_by_one[1]))) == 2


def test_a_rank_sends_itself_its_part_of_an_exchange() -> None:
    parts = [[*(f"a {r} send {8 + r} 9 {to}" for to in (0, 1)), *(f"a {r} receive {8 + of} 9 {of}" for of in (0, 1))]
             for r in (0, 1)]
    both = [[f"communicator begins|a 2 {r}", *batch(*parts[r])] for r in (0, 1)]
    assert operation_faults(logs(*both)) == []
    alone = ["communicator begins|a 1 0", *batch("a 0 send 8 9 0"), *batch("a 0 receive 8 9 0")]
    assert "send of 8 (dtype 9) to 0 is never answered" in operation_faults(logs(alone))[0]


def test_a_rank_that_never_came_and_an_illegal_launch_are_named() -> None:
    alone = logs(["communicator begins|a 2 0", "illegal launch|0,1,1 64 0 k"])
    assert meeting_faults(alone) == ["rank 0 waits for ever in the communicator a of 2 ranks"]
    assert "1 of its 2 ranks have no log" in faults(alone)[1] and "illegal launch 0,1,1" in faults(alone)[2]


# ------------------------------------------------------------------------------------------------ streams of one rank


def rank(*lines: str) -> RankLog:
    """``kind|stream|detail|memory`` lines of one rank."""
    return RankLog(0, [Event(*(line.split("|") + [""] * 3)[:4]) for line in lines])


WRITE, READ = "kernel|0|write|w1000:64", "copy|8|device device 64|r1000:64 w9000:64"
"""A kernel on the default stream writes what a copy on another stream reads."""


def test_a_read_after_an_event_of_the_writer_is_in_order() -> None:
    assert race_faults(rank(WRITE, "record|0|e", "await|8|e", READ)) == []
    assert race_faults(rank(WRITE, "wait|0|cudaStreamSynchronize", READ)) == []
    assert race_faults(rank(WRITE, "record|0|e", "query|e|event", READ)) == []
    assert race_faults(rank(WRITE, "wait|0|cudaDeviceSynchronize", READ)) == []
    chain = ["record|0|e", "await|5|e", "kernel|5|between|w500:4", "record|5|f", "await|8|f"]
    assert race_faults(rank(WRITE, *chain, READ)) == []


def missing_event() -> list[str]:
    return [WRITE, READ]


def missing_wait() -> list[str]:
    return [WRITE, "record|0|e", READ]


def recorded_too_early() -> list[str]:
    return ["record|0|e", WRITE, "await|8|e", READ]


def waited_for_another_event() -> list[str]:
    return [WRITE, "record|0|e", "record|5|f", "await|8|f", READ]


def overwritten_while_read() -> list[str]:
    return [READ, WRITE]


def overlapping_ends() -> list[str]:
    return ["kernel|0|write|w103f:1", READ]


@pytest.mark.parametrize("lines", [
    missing_event, missing_wait, recorded_too_early, waited_for_another_event, overwritten_while_read, overlapping_ends,
], ids=lambda value: value.__name__)
def test_a_race_between_streams_is_found(lines: Callable[[], list[str]]) -> None:
    (fault,) = race_faults(rank(*lines()))
    assert "nothing orders it after" in fault and fault.startswith("rank 0: ")
    assert fault in faults([rank(*lines())])


def test_what_does_not_conflict_is_no_race() -> None:
    assert race_faults(rank("kernel|0|a|r1000:64", "kernel|8|b|r1000:64")) == []
    assert race_faults(rank("kernel|0|a|w1000:64", "kernel|8|b|w1040:64")) == []
    assert race_faults(rank("kernel|0|a|w1000:64", "kernel|0|b|w1000:64")) == []


def test_a_range_across_blocks_is_one_range() -> None:
    block = 1 << 21
    wide = f"fill|0|x|w{block - 16:x}:{3 * block}"
    for at in (block - 1, 2 * block, 4 * block - 17):
        assert len(race_faults(rank(wide, f"kernel|8|b|r{at:x}:1"))) == 1, at
    assert race_faults(rank(wide, f"kernel|8|b|r{4 * block - 16:x}:1")) == []


def test_a_pinned_buffer_freed_while_a_copy_reads_it_is_found() -> None:
    copy = "copy|8|pinned device 64|r5000:64 w9000:64"
    (fault,) = race_faults(rank(copy, "free|0|pinned 5000 4096"))
    assert "pinned memory is freed while copy pinned device 64" in fault
    for waited in ("wait|8|cudaStreamSynchronize", "wait|0|cudaDeviceSynchronize"):
        assert race_faults(rank(copy, waited, "free|0|pinned 5000 4096")) == []
    assert race_faults(rank(copy, "free|0|pinned 6000 4096")) == []
    # The address comes again as another buffer.
    again = "copy|5|pinned device 64|r5000:64 w7000:64"
    assert race_faults(rank(copy, "wait|8|cudaStreamSynchronize", "free|0|pinned 5000 4096", again)) == []


def test_a_second_wait_within_a_step_is_counted() -> None:
    names = "step 1 begins", "step 1 ends"
    first, last = (f"mark|0|{name}" for name in names)
    end = "wait|0|cudaStreamSynchronize"
    assert waits_between(rank(end, first, WRITE, end, last, end), *names) == ["cudaStreamSynchronize"]
    assert len(waits_between(rank(first, "wait|0|cudaEventSynchronize", WRITE, end, last), *names)) == 2
    copy = "copy to pageable memory"
    assert waits_between(rank(first, f"wait|0|{copy}", end, last), *names) == [copy]
    with pytest.raises(ValueError, match="step 1 ends"):
        waits_between(rank(first, end), *names)


def test_groups_used_in_another_order_by_two_ranks_are_found_in_one_communicator() -> None:
    """The fifth planted fault: the communicator is made, but its collectives are asked for in another order."""
    start = [[f"communicator begins|a 2 {r}"] for r in (0, 1)]
    one, two = "nccl|a {} all_reduce 4 7 -1 0", "nccl|a {} all_gather 4 7 -1 0"
    right = [[*s, one.format(r), two.format(r)] for r, s in enumerate(start)]
    assert operation_faults(logs(*right)) == []
    assert len(operation_faults(logs(right[0], [*start[1], two.format(1), one.format(1)]))) == 2


# ------------------------------------------------------------------------------------------------ budgets of a step


def allowed() -> dict[str, float]:
    return {**dict.fromkeys(budgets.COUNTS, 100), "peak_bytes": 10**9, "planned_over_measured": 1.01}


@pytest.mark.parametrize(("key", "value", "says"), [
    ("kernels", 101, "101 kernels a step, 100 are allowed"), ("waits", 101, "101 waits a step"),
    ("own_kernels", 101, "101 own kernels a step"), ("peak_bytes", 1.006e9, "the allocator's peak is"),
    ("peak_bytes", 0.99e9, "the allocator's peak is"), ("planned_over_measured", 0.97, "the planner is off by 3.0%"),
])
def test_a_step_over_its_budget_is_named(key: str, value: float, says: str) -> None:
    assert budgets.over_budget("x", allowed(), allowed()) == []
    (fault,) = budgets.over_budget("x", {**allowed(), key: value}, allowed())
    assert says in fault and fault.startswith("x: ")


def test_calls_outside_the_marks_do_not_count() -> None:
    own = f"kernel|0|1,1,1 64 0 {budgets.OWN_KERNEL}11forward|"
    step = ["mark|0|step begins", own, "kernel|0|1,1,1 64 0 theirs", "wait|0|cudaStreamSynchronize", "mark|0|step ends"]
    found = budgets.counted(rank(own, *step, own, "wait|0|cudaDeviceSynchronize"))
    assert (found["kernels"], found["own_kernels"], found["waits"], found["early_waits"]) == (2, 1, 1, 0)
    early = budgets.counted(rank(*step[:2], "wait|0|cudaStreamSynchronize", *step[2:]))
    assert (early["waits"], early["early_waits"]) == (2, 1)


# ---------------------------------------------------------------- recorded steps


def steps_with_replays() -> list[Event]:
    """Six steps of two kernels and a product; the last three are replayed, the first of them captured before."""
    body = [Event("kernel", "7", "1 add", "ra:0 wb:0"), Event("product", "7", "Lt", "rb:0 wc:0")]
    out: list[Event] = []
    for step in range(recorded.STEPS):
        out.append(Event("copy", "7", recorded.MARK, "rf:64 we:64"))
        if step == recorded.STEPS - 3:
            out += [Event("capture", "9", "begins, mode 1"), Event("capture", "9", "ends, 2 calls")]
        replayed = step >= recorded.STEPS - 3
        out += [Event("graph begins", "7", "1"), *body, Event("graph ends", "7", "1")] if replayed else body
        out += [Event("kernel", "7", "1 last", "rc:0 wd:0"), Event("wait", "7", "copy to pageable memory")]
    return out


def test_replayed_steps_are_the_called_ones() -> None:
    log = RankLog(0, steps_with_replays())
    assert recorded.replay_faults(log) == recorded.capture_faults(log) == []
    steps = recorded.steps_of(log)
    assert [len(recorded.by_host(step)) for step in steps] == [5, 5, 5, 6, 4, 4]
    assert recorded.same_addresses(log) == (8, 8)


@pytest.mark.parametrize(("step", "event", "said"), [
    (4, Event("kernel", "7", "1 other", "ra:0 wb:0"), "call 1 is kernel 1 add, replayed kernel 1 other"),
    (5, Event("kernel", "7", "1 add", "ra:0 w8:0"), "1 calls of two replays touch other memory"),
    (2, None, "3 calls, 4 replayed"),
])
def test_a_replay_that_differs_is_found(step: int, event: Event | None, said: str) -> None:
    events = steps_with_replays()
    begins = [i for i, e in enumerate(events) if e.detail == recorded.MARK]
    if event is not None:
        events[begins[step] + 2] = event
    else:
        del events[begins[step] + 3]
    (fault,) = recorded.replay_faults(RankLog(0, events))
    assert said in fault


@pytest.mark.parametrize("event", [
    Event("kernel", "3", "1 add", ""), Event("communicator begins", "0", "a 2 0"),
    Event("capture fault", "0", "the host waits for a captured stream: cudaStreamSynchronize"),
])
def test_what_a_capture_may_not_contain_is_found(event: Event) -> None:
    events = steps_with_replays()
    events.insert([e.kind for e in events].index("capture") + 1, event)
    (fault,) = recorded.capture_faults(RankLog(0, events))
    assert event.detail in fault


def test_only_a_later_step_that_waits_twice_is_a_fault() -> None:
    step = ["mark|step begins", "kernel|a", "wait|cudaStreamSynchronize", "mark|step ends"]
    twice = [*step[:-1], "kernel|b", "query|event", "wait|copy to pageable memory", "mark|step ends"]
    (right,), (wrong,) = logs([*twice, *step]), logs([*step, *twice])
    assert wait_faults(right) == []
    assert wait_faults(wrong) == [
        "rank 0: the host waits 2 times in a step: cudaStreamSynchronize; copy to pageable memory"
    ]
    assert wait_faults(wrong, 2) == []


def test_a_step_may_wait_once_in_each_layer_of_experts() -> None:
    """Two stages of two layers with two micro-batches; only where the host itself decides is any number allowed."""
    dense = Case("1x2x1", "1f1b", "0", "bf16", "full", "none", "gpt", "waits", "on", "resume")
    experts = replace(dense, schedule="1f1b-2", experts="2")
    assert [dense.most_waits, experts.most_waits, replace(experts, layout="1x1x2").most_waits] == [1, 5, 3]
    for change in ({"kernels": "off"}, {"offload": "cpu"}, {"engine": "deepspeed"}):
        assert replace(experts, **change).most_waits is None


@pytest.mark.parametrize(("key", "found"), [("waits", 2.0), ("products", 13.0), ("launches", 999.0)])
def test_a_layer_of_experts_that_costs_more_than_the_table_is_named(key: str, found: float) -> None:
    row = {"waits": 1.0, "products": 12.0, "launches": 90.0}
    wrong = expert_waits.over_budget("ep 2", row | {key: found}, row)
    assert wrong == ([] if key == "launches" else [
        f"ep 2: {found:g} {key} of a layer of experts and micro-batch, {row[key]:g} are allowed"])


@pytest.mark.parametrize("fault", planted.planned(), ids=lambda fault: fault.name)
def test_a_fault_to_plant_fits_the_package(fault: planted.Fault) -> None:
    text = (planted.ROOT / "megatron_port" / fault.file).read_text()
    assert text.count(fault.old) == 1
    compile(text.replace(fault.old, fault.new), fault.file, "exec")


def test_priorities_of_a_communicators_streams() -> None:
    events = [Event("communicator begins", "0", "a 2 0"), Event("stream", "s1", "-3"), Event("stream", "s2", "0"),
              Event("nccl", "s1", "a 0 all_reduce 1 7 -1 0"), Event("communicator begins", "0", "b 2 0"),
              Event("nccl", "0", "b 0 all_reduce 1 7 -1 0"), Event("nccl", "s2", "a 0 all_reduce 1 7 -1 0")]
    assert stream_priorities(RankLog(0, events)) == {"a": {-3, 0}, "b": set()}
