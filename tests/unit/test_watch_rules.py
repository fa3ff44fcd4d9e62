"""The rules of the watch on a clock of the test's own: what is trouble, what is not, and who is named."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import pytest

from megatron_port.core.config.schema import WatchConfig
from megatron_port.core.dist.process import DATA, EVALUATE, FORWARD, REDUCE, SAVE, START, STEP, TRANSFER
from megatron_port.run.watch import rules as judge
from megatron_port.run.watch.rules import MARGIN_S, Alarm, Beat, RankIdentity, Rules

TORCH = ("/site/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
BARRIER = ("/site/torch/distributed/distributed_c10d.py", 5356, "barrier")
WRAPPER = ("/site/torch/distributed/c10d_logger.py", 83, "wrapper")
OURS = ("/x/megatron_port/core/engine/native.py", 150, "train_step")
LOADER = ("/x/megatron_port/core/data/loader.py", 71, "step")


class Run:
    """Ranks that beat once a second; each makes progress unless it is told not to."""

    def __init__(self, world: int = 4, config: WatchConfig | None = None, step_s: float = 0.5) -> None:
        self.now, self.world, self.step_s = 1000.0, world, step_s
        self.rules = Rules(config or WatchConfig(), world, self.now)
        self.began = self.now
        self.beats = {r: Beat(0, START, START, "", -1, 0.0, 0, 0, 0.0, (0.0,) * 6) for r in range(world)}
        self.progress = dict.fromkeys(range(world), self.now)
        for r in range(world):
            self.rules.hello(RankIdentity(r, f"n{r // 2}", 100 + r, 7, f"pp 0, dp {r}, tp 0", 0), self.now)

    def stand(self, rank: int, scope: str, phase: str, operation: str = "") -> None:
        """The rank is at this from now on."""
        b = self.beats[rank]
        self.beats[rank] = replace(b, counter=b.counter + 1, scope=scope, phase=phase, operation=operation)
        self.progress[rank] = self.now

    def second(self, *, frozen: Set[int] = frozenset(), mute: Set[int] = frozenset()) -> Alarm | None:
        """A second passes: all but ``frozen`` ranks take steps, all but ``mute`` ones beat."""
        for _ in range(4):
            self.now += 0.25
            alarm = self.rules.tick(self.now)
            if alarm is not None:
                return alarm
        for r in range(self.world):
            if r not in frozen:
                done = int((self.now - self.began) / self.step_s)
                self.beats[r] = replace(
                    self.beats[r], counter=self.beats[r].counter + 1, scope=STEP, phase=FORWARD, step=done,
                    steps_done=done, step_seconds=done * self.step_s,
                )
                self.progress[r] = self.now
            if r not in mute:
                self.rules.beat(r, replace(self.beats[r], age=self.now - self.progress[r]), self.now)
        return None

    def until_alarm(self, seconds: int, **how: set[int]) -> tuple[Alarm | None, float]:
        """(alarm, seconds until then)."""
        start = self.now
        for _ in range(seconds):
            alarm = self.second(**how)
            if alarm is not None:
                return alarm, self.now - start
        return None, self.now - start


def everybody(world: int = 4) -> set[int]:
    return set(range(world))


def test_a_run_that_goes_on_is_no_trouble() -> None:
    assert Run().until_alarm(300)[0] is None


@pytest.mark.parametrize(("step_s", "limit"), [(0.5, 10.0), (6.0, 18.0), (60.0, 180.0)])
def test_a_hang_is_called_within_ten_seconds_or_three_steps(step_s: float, limit: float) -> None:
    run = Run(step_s=step_s)
    assert run.until_alarm(int(20 * step_s) + 5)[0] is None
    alarm, after = run.until_alarm(1000, frozen=everybody())
    assert alarm is not None and alarm.kind == "hang"
    assert limit - 2 * MARGIN_S - step_s <= after <= limit and alarm.deadline == pytest.approx(limit)


def test_a_rank_that_only_stays_silent_while_steps_go_on_is_no_trouble() -> None:
    run = Run()
    run.until_alarm(20)
    assert run.until_alarm(100, mute={2})[0] is None


def test_a_stopped_rank_is_named_although_its_last_heartbeat_was_of_the_start() -> None:
    run = Run()
    run.until_alarm(3, frozen={1}, mute={1})  # it stopped before its second heartbeat
    alarm, after = run.until_alarm(100, frozen=everybody(), mute={1})
    assert alarm is not None and after <= 10
    verdict = judge.hang(run.rules, alarm, {r: [("MainThread", [OURS, WRAPPER, TORCH])] for r in (0, 2, 3)}, run.now)
    assert verdict.ranks == (1,) and verdict.code == 7 and "no heartbeat for" in verdict.headline
    assert verdict.headline.startswith("rank 1 on n0 (pp 0, dp 1, tp 0)")
    assert "ranks 0, 2-3 wait in all_reduce (core.engine.native.train_step)" in verdict.details


@pytest.mark.parametrize(
    ("scope", "limit"), [(START, 1800.0), (EVALUATE, 600.0), (SAVE, 1800.0)],
)
def test_scopes_have_deadlines_of_their_own(scope: str, limit: float) -> None:
    run = Run()
    if scope != START:
        run.until_alarm(20)
    for r in range(4):
        run.stand(r, scope, scope)
    alarm, after = run.until_alarm(3000, frozen=everybody())
    assert alarm is not None and limit - 4 <= after <= limit


def test_one_rank_that_saves_keeps_the_others_waiting() -> None:
    run = Run()
    run.until_alarm(20)
    run.stand(0, SAVE, SAVE)
    assert run.until_alarm(1000, frozen=everybody())[0] is None


def test_progress_of_one_rank_in_a_save_is_progress() -> None:
    run = Run(config=WatchConfig(save_seconds=30))
    run.until_alarm(20)
    for r in range(4):
        run.stand(r, SAVE, SAVE)
    for _ in range(10):
        assert run.until_alarm(20, frozen=everybody())[0] is None
        run.stand(3, SAVE, SAVE, "next tensor")
    assert run.until_alarm(40, frozen=everybody())[0] is not None


def test_a_rank_that_cannot_run_in_a_save_is_found_before_the_saves_deadline() -> None:
    run = Run()
    run.until_alarm(20)
    for r in range(4):
        run.stand(r, SAVE, SAVE)
    run.second(frozen=everybody())
    alarm, after = run.until_alarm(200, frozen=everybody(), mute={2})
    assert alarm is not None and (alarm.kind, alarm.rank) == ("hang", 2) and after <= 31


def test_communicators_have_a_deadline_of_their_own() -> None:
    """Also where some ranks have theirs already, and wait for the others in another operation of the start."""
    run = Run()
    for r in range(4):
        run.stand(r, START, START, "communicator tp (ranks 0-1)" if r < 2 else "")
    alarm, after = run.until_alarm(300, frozen=everybody())
    assert alarm is not None and 116 <= after <= 120 and alarm.deadline == 120
    stacks = {r: [("MainThread", [OURS, WRAPPER, TORCH])] for r in (0, 2, 3)}
    verdict = judge.hang(run.rules, alarm, {**stacks, 1: [("MainThread", [OURS])]}, run.now)
    assert verdict.ranks == (1,) and "step 0, start, communicator tp (ranks 0-1): it answers" in verdict.headline
    assert "rank 0 waits in start, communicator tp (ranks 0-1)" in verdict.details

    run = Run()
    for r in range(4):
        run.stand(r, START, START, "communicator dp (ranks 0-3)")
    run.second(frozen=everybody())
    alarm, after = run.until_alarm(300, frozen=everybody(), mute={3})
    assert alarm is not None and alarm.rank == 3 and after <= 31
    everyone = {r: [("MainThread", [OURS, WRAPPER, TORCH])] for r in range(4)}
    verdict = judge.hang(run.rules, Alarm("hang", 0, 120.0), everyone, run.now)
    assert "all ranks wait in the same operation, start, communicator dp (ranks 0-3)" in verdict.headline


def test_progress_of_a_communicator_is_progress() -> None:
    run = Run()
    for step in range(20):
        for r in range(4):
            run.stand(r, START, START, f"communicator {step} (ranks 0-3)")
        assert run.until_alarm(60, frozen=everybody())[0] is None


def test_data_may_be_given_more_time() -> None:
    run = Run(config=WatchConfig(data_seconds=60))
    run.until_alarm(20)
    run.stand(1, STEP, DATA)
    alarm, after = run.until_alarm(200, frozen=everybody())
    assert alarm is not None and 56 <= after <= 60


def test_a_watch_that_was_stopped_with_the_job_forgets_that_time() -> None:
    run = Run()
    run.until_alarm(20)
    run.now += 3600
    assert run.until_alarm(5)[0] is None
    run.now += 3600
    assert run.until_alarm(5, frozen=everybody())[0] is None


def test_a_lost_rank_and_its_victims() -> None:
    run = Run()
    run.until_alarm(20)
    run.rules.failing(0, code=3, text="lost contact", told=True, victim=True, now=run.now)  # heard of first
    run.rules.closed(2, run.now + 0.1)
    alarm, after = run.until_alarm(10, frozen=everybody())
    assert alarm is not None and (alarm.kind, alarm.rank) == ("lost", 2) and after <= 1
    verdict = judge.lost(run.rules, 2, words="Fatal Python error: Segmentation fault\n  File x", hint="memory")
    assert verdict.code == 3 and verdict.ranks == (2,)
    assert verdict.headline.startswith("rank 2 on n1 (pp 0, dp 2, tp 0) is gone at step")
    assert "Fatal Python error: Segmentation fault; memory" in verdict.headline and "  File x" in verdict.details


def test_the_first_of_several_lost_ranks_is_named() -> None:
    run = Run()
    run.until_alarm(20)
    run.rules.closed(3, run.now)
    run.rules.closed(1, run.now + 0.2)
    alarm, _ = run.until_alarm(10, frozen=everybody())
    assert alarm is not None and alarm.rank == 3
    verdict = judge.lost(run.rules, 3)
    assert verdict.ranks == (3, 1) and "after it rank 1 ended too" in verdict.details


def test_all_ranks_gone_at_once() -> None:
    run = Run()
    run.until_alarm(20)
    for r in range(4):
        run.rules.closed(r, run.now)
    alarm, _ = run.until_alarm(5, frozen=everybody())
    assert alarm is not None and "all 4 ranks ended at once" in judge.lost(run.rules, alarm.rank).headline


def test_victims_without_a_cause_may_speak() -> None:
    run = Run()
    run.until_alarm(20)
    run.rules.failing(0, code=3, text="lost contact", told=True, victim=True, now=run.now)
    alarm, after = run.until_alarm(20, frozen={0, 1})
    assert alarm is not None and alarm.kind == "unexplained" and 3 < after < 6
    run.rules.explained()
    assert run.until_alarm(5, frozen={0})[0] is None


def test_an_error_that_all_agree_on_is_told_by_rank_0() -> None:
    run = Run()
    run.until_alarm(20)
    for r in range(4):
        run.rules.failing(r, code=4, text="no corpus", told=r == 0, victim=False, now=run.now)
    alarm, _ = run.until_alarm(5, frozen=everybody())
    assert alarm is not None and alarm.kind == "failed"
    assert judge.failed(run.rules, alarm.rank).told and judge.failed(run.rules, alarm.rank).code == 4


def test_an_error_of_one_rank_is_told_for_it_and_comes_before_its_victims() -> None:
    run = Run()
    run.until_alarm(20)
    run.rules.failing(2, code=4, text="unreadable", told=False, victim=False, now=run.now)
    run.rules.closed(2, run.now + 0.01)
    run.rules.failing(0, code=3, text="lost contact", told=True, victim=True, now=run.now + 0.02)
    alarm, after = run.until_alarm(5, frozen=everybody())
    assert alarm is not None and (alarm.kind, alarm.rank) == ("failed", 2) and after <= 2.5
    verdict = judge.failed(run.rules, 2)
    assert not verdict.told and verdict.code == 4 and verdict.headline.endswith(": unreadable")


def test_leaving_is_no_loss() -> None:
    run = Run()
    run.until_alarm(20)
    for r in range(4):
        run.rules.goodbye(r)
        run.rules.closed(r, run.now)
    assert run.until_alarm(100, frozen=everybody(), mute=everybody())[0] is None


def judged(run: Run, stacks: dict) -> judge.Diagnosis:
    alarm, _ = run.until_alarm(100, frozen=everybody())
    assert alarm is not None
    return judge.hang(run.rules, alarm, stacks, run.now)


def test_the_rank_that_waits_for_nobody_is_named() -> None:
    run = Run()
    run.until_alarm(20)
    for r in (0, 1, 3):
        run.stand(r, STEP, REDUCE, "gradients over dp")
    run.now += 0.5
    run.stand(2, STEP, DATA, "samples from")
    verdict = judged(run, {2: [("MainThread", [OURS, LOADER])], 0: [("MainThread", [OURS, WRAPPER, TORCH])]})
    assert verdict.ranks == (2,) and "waits for no other rank; it is at loader.py:71 in step" in verdict.headline
    assert "rank 0 waits in all_reduce (core.engine.native.train_step)" in verdict.details
    assert "ranks 1, 3 wait in reduce, gradients over dp" in verdict.details


def test_of_ranks_that_all_wait_the_odd_one_is_named() -> None:
    run = Run()
    run.until_alarm(20)
    for r in range(4):
        run.stand(r, STEP, TRANSFER if r == 3 else REDUCE)
    stacks = {r: [("MainThread", [OURS, WRAPPER, BARRIER if r == 3 else TORCH])] for r in range(4)}
    verdict = judged(run, stacks)
    assert verdict.ranks == (3,) and "this one in barrier (core.engine.native.train_step)" in verdict.headline
    assert verdict.details == ("ranks 0-2 wait in all_reduce (core.engine.native.train_step)",)


def test_a_call_of_ours_inside_of_a_collective_is_no_wait() -> None:
    """A hook that torch.distributed calls, and a sleep below it."""
    run = Run()
    run.until_alarm(20)
    for r in range(4):
        run.stand(r, STEP, FORWARD)
    stacks = {r: [("MainThread", [OURS, WRAPPER, TORCH])] for r in range(4)}
    stacks[1] = [("MainThread", [OURS, TORCH, LOADER])]
    assert judged(run, stacks).ranks == (1,)
