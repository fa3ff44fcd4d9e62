"""State of a run: what a checkpoint holds of it, and the checkpoints that a start may continue from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_port.core.checkpoint.format import Manifest, SavedState, read_manifest, step_of
from megatron_port.core.checkpoint.reader import checkpoints_in
from megatron_port.core.checkpoint.writer import Committer, peers_of, save_checkpoint
from megatron_port.core.config.dump import as_dict
from megatron_port.core.config.ranges import is_remote
from megatron_port.core.config.schema import RunConfig
from megatron_port.core.data.indexed import OWN_TOKENIZERS
from megatron_port.core.dist.agree import agreed, broadcast_text
from megatron_port.core.dist.record import ParameterRecord
from megatron_port.core.engine.api import Engine
from megatron_port.core.errors import CheckpointError
from megatron_port.core.optim.rules import mixed_kinds, rule_of, state_kinds, state_shapes
from megatron_port.core.optim.schedules import BatchSchedule, learning_rate
from megatron_port.core.registry import PARTS
from megatron_port.core.train.folders import FOLDER, run_folder
from megatron_port.core.train.hooks import Session
from megatron_port.run.build import state_records
from megatron_port.run.config_hash import config_hash
from megatron_port.run.provenance import own_checkpoints, read_identity


def find_checkpoints(session: Session, *, since: int = 0, below: int = -1) -> list[Path]:
    """Return the checkpoints to start from, as ``checkpoint.resume`` selects, best first; empty: start afresh.

    ``since``: epoch of the run folder's lease in which this job first trained, where it recovers a lost rank (0: it
    does not). Then the job's own copies and checkpoints come before what it had begun from. ``below``: copies of this
    step and of later ones are not used (negative: all are).

    Rank 0 looks, all use what it found. The newest commit comes first; those after it are what to fall back on if
    its contents turn out damaged. The path of one checkpoint has no second choice. What can be said against resuming
    from the newest is said here, before the model is built.

    Raises:
        CheckpointError: on every rank: a path was given and nothing whole is there, there are checkpoints and every
            one is damaged (a run never starts over without being told to), or all are of another run.
        ConfigError: on every rank: the batch schedule, the seed or the optimizer's rule is not that of the newest.
    """
    checkpoint = session.config.checkpoint
    copies: list[tuple[Path, Manifest]] = []
    if checkpoint.memory_interval and (checkpoint.resume == "auto" or since):
        folder = run_folder(session.config)
        identity = agreed(lambda: read_identity(folder) if session.is_rank_zero else None)
        copies = PARTS.function("copies in memory")(session, identity.id if identity is not None else "", below)

    def look() -> list[str]:
        if not session.is_rank_zero:
            return []
        whole = _of_job(copies, session, since) if since else []
        if checkpoint.resume != "never":
            whole += _with_copies(copies if checkpoint.resume == "auto" else [], session, known=whole)
        if whole:
            from megatron_port.run.changes import check_batch, check_rule, check_seed  # a fresh start loads nothing
            from megatron_port.run.loading import of_this_model

            whole = of_this_model(whole, session.config, session.logger.log)
            path, manifest = whole[0]
            check_batch(manifest, session.config, session.ctx.size("dp"), str(path))
            check_seed(manifest, session.config, str(path))
            check_rule(manifest, session.config, str(path))
        return [str(path) for path, _ in whole]

    found = agreed(look)
    return [Path(path) for path in json.loads(broadcast_text(json.dumps(found)) or "[]")]


Found = list[tuple[Path, Manifest]]


def _when(manifest: Manifest) -> tuple[int, int]:
    """Return when a state was reached: the epoch of its attempt, and its step. A save in the background is committed
    after copies of later steps, so that commits do not order the two kinds; going back drops the copies."""
    return manifest.lineage.epoch, manifest.state.step


def _of_job(copies: Found, session: Session, since: int) -> Found:
    """Return this job's own copies and checkpoints, newest first; of one step the copy comes first."""
    identity, known = read_identity(run_folder(session.config)), {path for path, _ in copies}
    saved = [(path, m) for path, m in checkpoints_in(run_folder(session.config) / FOLDER, session.logger.log)
             if identity is not None and m.lineage.run == identity.id and path not in known]
    return sorted((found for found in [*copies, *saved] if found[1].lineage.epoch >= since), key=lambda f: _when(f[1]),
                  reverse=True)


def _with_copies(copies: Found, session: Session, *, known: Found) -> Found:
    """Return the run's checkpoints and its copies on the nodes, newest first, without those that are known.

    Raises CheckpointError: there is neither.
    """
    paths = {path for path, _ in known}
    own = [found for found in copies if found[0] not in paths]
    paths |= {path for path, _ in own}
    try:
        saved = [found for found in _look(session.config, session.logger.log) if found[0] not in paths]
    except CheckpointError as error:
        if not own and not known:
            raise
        session.logger.log(f"{error}; the copies on the nodes are whole" if own else str(error))
        return own
    newer = [copy for copy in own if not saved or _when(copy[1]) >= _when(saved[0][1])]
    return [*newer, *saved, *(copy for copy in own if copy not in newer)]


def batch_schedule(session: Session, checkpoints: Sequence[Path]) -> BatchSchedule:
    """Return the batch of each step, on every rank; of a run whose ramp-up has ended and is no setting any more, too.

    ``checkpoints``: what :func:`find_checkpoints` found. Raises ConfigError on every rank.
    """
    config = session.config
    begun = None
    if checkpoints and not config.batch.rampup_start:
        from megatron_port.run.changes import ended_rampup

        own = agreed(lambda: ended_rampup(read_manifest(checkpoints[0]), config) if session.is_rank_zero else None)
        told = json.loads(broadcast_text(json.dumps(own)) or "null")
        begun = None if told is None else (int(told[0]), int(told[1]))
    return BatchSchedule(config.batch, session.ctx.size("dp"), begun)


def _look(config: RunConfig, note: Any) -> list[tuple[Path, Manifest]]:
    asked, automatic = Path(config.checkpoint.resume), config.checkpoint.resume == "auto"
    if is_remote(config.checkpoint.resume):
        from megatron_port.ext.storage.mirror import pull

        pulled = pull(config.checkpoint.resume, run_folder(config) / "pulled", note)
        return [(pulled, read_manifest(pulled))]
    if automatic:
        places = [run_folder(config) / FOLDER]
    elif (asked / "manifest.json").is_file():
        return [(asked, read_manifest(asked))]
    else:
        places = [asked, asked / FOLDER]
    for place in places:
        found = checkpoints_in(place, note)
        if automatic:
            found = own_checkpoints(run_folder(config), config, found, note)
        if found:
            return found
    damaged = [p for place in places if place.is_dir() for p in place.iterdir() if step_of(p.name) is not None]
    if damaged:
        raise CheckpointError(
            f"checkpoint.resume = \"{config.checkpoint.resume}\": none of the {len(damaged)} checkpoints in "
            f"{damaged[0].parent} is whole (see above); restore one, or start afresh with checkpoint.resume = "
            "\"never\" or another name"
        )
    if config.checkpoint.resume != "auto":
        raise CheckpointError(
            f"checkpoint.resume = \"{asked}\": no whole checkpoint there; give a step folder, a folder of "
            'them, "auto" or "never"'
        )
    return []


@dataclass(frozen=True, kw_only=True)
class Position:
    """Position of a run, for its checkpoint."""

    step: int
    samples: int
    skipped: int
    tokenizer: str | None = None
    numerics: dict[str, Any] | None = None
    """State of the numerics guard."""
    tokenizer_identity: dict[str, Any] | None = None
    """``data.tokenizer.identity`` of the corpora's tokenizer, where it is known."""
    corpora: list[dict[str, Any]] | None = None
    """What the corpora are (``corpora.verify``)."""
    base: dict[str, Any] | None = None
    """Which weights are frozen (``weights.readers``); None: none are."""
    objective: Mapping[str, Any] = field(default_factory=dict)
    """What it learns from beside the corpora (``data.objective.Objective.identity``)."""


def _own_identity(tokenizer: str | None) -> dict[str, Any]:
    """Return the identity of one of the package's own tokenizers; empty: it is another, or none."""
    if tokenizer not in OWN_TOKENIZERS:
        return {}
    from megatron_port.ext.corpora.tokenizer import identity

    return identity(tokenizer)


MOVING = ("step", "samples", "tokens", "scalars", "extra", "data", "schedule")
"""Fields of a state that change while a run trains."""


def state_of(
    engine: Engine, config: RunConfig, at: Position, records: Mapping[str, ParameterRecord] | None = None,
    *, before: SavedState | None = None,
) -> SavedState:
    """Return all of a checkpoint that is not a tensor.

    Args:
        records: of the whole model's parameters and buffers, on rank 0, whose state is the one that is written.
        before: an earlier state of this start, whose other fields than ``MOVING`` are taken.
    """
    schedule = {
        "step": at.step, "steps": config.training.steps,
        "decay_steps": config.optimizer.decay_steps or config.training.steps,
        "learning_rate": learning_rate(config.optimizer, at.step, config.training.steps),
        "samples": at.samples,
    }
    data = {
        "next_sample": at.samples, "order": config.data.order, "seed": config.seed, "train": list(config.data.train),
        "weights": list(config.data.weights), "split": list(config.data.split), "synthetic": config.data.synthetic,
        "corpora": at.corpora or [], "source": config.data.source,
    }
    extra = {
        "skipped_total": at.skipped, "tokenizer": at.tokenizer, "numerics": at.numerics or {},
        **({"base": at.base} if at.base else {}), **at.objective,
    }
    tokens, scalars = at.samples * config.model.seq_length, engine.scalar_state()
    if before is not None:
        return replace(before, step=at.step, samples=at.samples, tokens=tokens, scalars=scalars, extra=extra, data=data,
                       schedule=schedule)
    rule = rule_of(config.optimizer)
    rng = {"scheme": "counter", "seed": config.seed, "keys": ["step", "sample", "operation", "element"]}
    return SavedState(
        step=at.step, samples=at.samples, tokens=tokens, layout=config.layout, config=as_dict(config), scalars=scalars,
        extra=extra, rng=rng, data=data, schedule=schedule, config_hash=config_hash(config),
        tokenizer=at.tokenizer_identity or _own_identity(at.tokenizer),
        kinds=mixed_kinds(state_kinds(rule, (records or {}).values())),
        shapes=state_shapes(rule, (records or {}).values()),
    )


def save_state(engine: Engine, session: Session, at: Position, committer: Committer | None = None) -> Path:
    """Commit a checkpoint of the whole run, synchronously. Collective."""
    config = session.config
    records = saved_records(config) if session.is_rank_zero else None
    return save_checkpoint(
        run_folder(config) / FOLDER, state_of(engine, config, at, records), engine.state_pieces(),
        keep=config.checkpoint.keep, peers=peers_of(session.cpu_group),
        expected=shapes_of(records), note=session.logger.log, verify=config.checkpoint.verify_saves,
        compare=engine.state_check_interval > 0, committer=committer,
    )


def saved_records(config: RunConfig) -> dict[str, ParameterRecord]:
    """Return the records of all that a checkpoint of a run holds, by canonical name."""
    return state_records(config.model, config.fine_tuning)


def shapes_of(records: Mapping[str, ParameterRecord] | None) -> dict[str, tuple[int, ...]] | None:
    """Return the logical shape of all that a whole checkpoint has, by name; None on ranks without records."""
    return None if records is None else {name: record.shape for name, record in records.items()}
