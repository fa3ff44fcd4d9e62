"""The list of what a run does beside its steps. A hook's module is imported where the configuration asks for it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import LOOP_HOOKS, PARTS, Registry
from megatron_port.core.train.evaluation import Evaluation
from megatron_port.core.train.hooks import LoopHook, LoopState
from megatron_port.ext.health.recovery import DamageCheck, Recovery
from megatron_port.ext.telemetry.reporting import Reporting
from megatron_port.run.closing import Closing
from megatron_port.run.saving import PeriodicSave, SaveInFlight


def loop_hooks(state: LoopState) -> list[LoopHook]:
    """Return the hooks of a run, in the order in which the loop asks them.

    The order matters: damage is known before a step is reported, a step is reported before an anomaly can end the run,
    and a rewind comes before anything that looks at the state.

    Raises:
        ConfigError: a hook cannot do what the configuration asks for; alike on all ranks.
    """
    c, reporting, in_flight = state.config, Reporting(state), SaveInFlight(state)
    return [
        *_activation_planner(state), DamageCheck(state), reporting, Recovery(state), *_rewind(state), in_flight,
        *_routes(state), *_profiler(state), Evaluation(state, reporting.evaluation), *_checks(state),
        *(_plugin(name, state) for name in c.training.hooks),
        PeriodicSave(state, in_flight), Closing(state, reporting),
    ]


def _activation_planner(state: LoopState) -> Iterator[LoopHook]:
    if state.config.activations.policy in ("plan", "profile"):
        yield _made(PARTS, "activation planner", state)


def _rewind(state: LoopState) -> Iterator[LoopHook]:
    if state.config.numerics.on_anomaly == "rewind":
        from megatron_port.ext.health.rewind import Rewind

        yield Rewind(state)


def _routes(state: LoopState) -> Iterator[LoopHook]:
    moe = state.config.moe
    if moe.routes == "log" or moe.replay:
        from megatron_port.ext.telemetry.routes import Routes

        yield Routes(state)


def _profiler(state: LoopState) -> Iterator[LoopHook]:
    if state.config.telemetry.profile:
        from megatron_port.ext.health.profile import Profiler

        yield Profiler(state)


def _checks(state: LoopState) -> Iterator[LoopHook]:
    if state.config.telemetry.replica_check_interval:
        yield _made(PARTS, "replica check", state)
    if state.config.numerics.replay_interval:
        yield _made(PARTS, "replay check", state)


def _plugin(name: str, state: LoopState) -> LoopHook:
    """Return the hook that a plugin has registered."""
    return _made(LOOP_HOOKS, name, state)


def _made(registry: Registry, name: str, state: LoopState) -> LoopHook:
    hook = registry.function(name)(state)
    if not isinstance(hook, LoopHook):
        raise ConfigError(f"{registry.what} {name!r} makes a {type(hook).__name__}, which is no LoopHook (train.hooks)")
    return hook
