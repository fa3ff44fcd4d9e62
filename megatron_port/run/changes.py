"""What differs between a run and the checkpoint that it resumes from: refused, or named setting by setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from megatron_port.core.checkpoint.format import Manifest, SavedState
from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.config.dump import as_dict, leaves
from megatron_port.core.config.model import RecurrentConfig
from megatron_port.core.config.schema import BatchConfig, ModelConfig, MoEConfig, OptimizerConfig, RunConfig
from megatron_port.core.data.indexed import OWN_TOKENIZERS, changes
from megatron_port.core.data.loader import Loaders
from megatron_port.core.dist.record import BUFFER, WEIGHT
from megatron_port.core.errors import ConfigError, DataError
from megatron_port.core.optim.schedules import BatchSchedule, learning_rate
from megatron_port.run.config_hash import config_hash
from megatron_port.run.same_model import with_sizes

JUMP = 1.5
"""A learning rate that changes at the resume by more than this factor, up or down, is announced as a jump."""
_SECTIONS = ("model", "batch", "precision", "optimizer", "data", "fine_tuning")
_UNSAID = ("name", "output_dir", "seed", "plugins")
"""Said elsewhere, or the same run under another name."""
_NEUTRAL = {("batch", "micro_batch_size"), ("model", "name"), ("fine_tuning", "adapters")}
"""Not in ``config_hash``: changing these changes no number of the run."""


def check_batch(manifest: Manifest, config: RunConfig, dp: int, where: str) -> None:
    """Check that the batch schedule has consumed, at the checkpoint's step, what the checkpoint's run consumed.

    Args:
        dp: data-parallel replicas of this run.
        where: the checkpoint, for the message.

    Raises:
        ConfigError: it has not: the run would leave samples out or use them twice.
    """
    state = manifest.state
    first = BatchSchedule(config.batch, dp, begun=ended_rampup(manifest, config)).samples_before(state.step)
    if first == state.samples:
        return
    saved = _section(state, "batch")
    changes = [
        f"batch.{key} {saved[key]!r} -> {value!r}" for key, value in as_dict(config.batch).items()
        if key in saved and saved[key] != value and key != "micro_batch_size"
    ]
    sizes = {f.name: saved[f.name] for f in fields(BatchConfig) if f.name in saved and f.name != "micro_batch_size"}
    back = ", ".join(f"batch.{key} = {value}" for key, value in sizes.items() if f"batch.{key} " in " ".join(changes))
    raise ConfigError(
        f"the batch schedule is not that of {where}: {', '.join(changes) or 'the settings are the same'}. "
        f"{state.samples} samples were consumed in its {state.step} steps; with these settings step {state.step} "
        f"begins at sample {first}. Put it back ({back or 'as it was'}), "
        + _rampup_left(state, saved)
        + _growing(state, config, saved, dp)
        + f'or begin another run with its weights: another name and checkpoint.initial_weights = "{where}"'
    )


def _rampup_left(state: SavedState, saved: Mapping[str, Any]) -> str:
    """Return when the checkpoint's ramp-up may be left out, if it has not ended yet."""
    over = saved.get("rampup_samples", 0)
    if not saved.get("rampup_start") or type(over) is not int or state.samples >= over:
        return ""
    return f"leave the ramp-up out once it has ended, after {over} samples, "


def ended_rampup(manifest: Manifest, config: RunConfig) -> tuple[int, int] | None:
    """Return (step, samples consumed) of a checkpoint whose ramp-up had ended, where ``config`` has none any more.

    Its batch stays what it was, so the schedule is the same from there on. None: the settings alone say the schedule.
    """
    state, saved, now = manifest.state, _section(manifest.state, "batch"), config.batch
    if now.rampup_start not in (0, now.global_batch_size) or saved.get("global_batch_size") != now.global_batch_size:
        return None
    start, over = saved.get("rampup_start", 0), saved.get("rampup_samples", 0)
    constant = start in (0, now.global_batch_size) or (type(over) is int and state.samples >= over)
    return (state.step, state.samples) if constant else None


def _growing(state: SavedState, config: RunConfig, saved: Mapping[str, Any], dp: int) -> str:
    """Return the ramp-up by which a constant batch grows into a larger one from this very step, if there is one."""
    old, new = saved.get("global_batch_size"), config.batch.global_batch_size
    constant = not saved.get("rampup_start") or saved.get("rampup_start") == old
    if not (type(old) is int and constant and 0 < old < new and state.samples == old * state.step):
        return ""
    batch = BatchConfig(
        micro_batch_size=config.batch.micro_batch_size, global_batch_size=new, rampup_start=old,
        rampup_increment=new - old, rampup_samples=state.samples,
    )
    try:
        schedule = BatchSchedule(batch, dp)
    except ConfigError:
        return ""
    if schedule.step_plan(state.step) != (state.samples, new):
        return ""
    return (
        f"grow it from here to {new} with batch.rampup_start = {old}, batch.rampup_increment = {new - old}, "
        f"batch.rampup_samples = {state.samples}, "
    )


def check_seed(manifest: Manifest, config: RunConfig, where: str) -> None:
    """Raise ConfigError if the seed is another: order of samples and dropout would be those of another run."""
    state = manifest.state  # an import has no hash: its data were of another program
    saved = state.config if isinstance(state.config, dict) and state.config_hash else {}
    before = saved.get("seed", config.seed)
    if before != config.seed and state.step and config.checkpoint.resume == "auto":
        raise ConfigError(
            f"seed {before!r} -> {config.seed}: {where} was trained with the order of samples and the dropout masks of "
            f"seed {before!r}; with another, some samples would come twice and others never. Set seed = {before}, or "
            f'begin another run from it: another name and checkpoint.resume = "{where}"'
        )


def starts_fresh(manifest: Manifest, config: RunConfig) -> bool:
    """Return whether a checkpoint's optimizer state is of another rule, and is left out as
    ``checkpoint.optimizer_state`` says."""
    before = _section(manifest.state, "optimizer").get("name", config.optimizer.name)
    return config.checkpoint.optimizer_state == "fresh" and before != config.optimizer.name


def check_rule(manifest: Manifest, config: RunConfig, where: str) -> None:
    """Raise ConfigError if the checkpoint's optimizer state is another rule's: its tensors mean something else."""
    before = _section(manifest.state, "optimizer").get("name", config.optimizer.name)
    if starts_fresh(manifest, config):
        return
    if before != config.optimizer.name and any(piece.kind not in (WEIGHT, BUFFER) for piece in manifest.pieces):
        raise ConfigError(
            f'optimizer.name "{before}" -> "{config.optimizer.name}": {where} holds the state of "{before}". Set '
            f'optimizer.name = "{before}", let the new rule start afresh from its weights by '
            'checkpoint.optimizer_state = "fresh", or begin another run with its weights: another name and '
            f'checkpoint.initial_weights = "{where}"'
        )


def changed_settings(manifest: Manifest, config: RunConfig) -> list[str]:
    """Return ``model.hidden_dropout 0.1 -> 0.0`` for each setting that determines training and has changed."""
    saved = manifest.state.config if isinstance(manifest.state.config, dict) else {}
    out = [
        f"{section}.{key} {old!r} -> {new!r}"
        for section in _SECTIONS
        for key, old, new in _changed(section, _section(manifest.state, section), as_dict(getattr(config, section)))
    ]
    if saved.get("seed", config.seed) != config.seed:
        out.append(f"seed {saved['seed']!r} -> {config.seed}")
    return out


def other_changes(manifest: Manifest, config: RunConfig) -> list[str]:
    """Return ``layout.tensor_parallel_size 2 -> 1`` for each other setting of the run that has changed."""
    saved = manifest.state.config if isinstance(manifest.state.config, dict) else {}
    known, out = dict(_leaves(saved)), []
    for name, value in leaves(config):
        section = name.partition(".")[0]
        told = (section in _SECTIONS and tuple(name.split(".", 1)) not in _NEUTRAL) or section in _UNSAID
        if not told and name in known:
            now = list(value) if isinstance(value, tuple) else value
            if known[name] != now:
                out.append(f"{name} {known[name]!r} -> {now!r}")
    return out


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _changed(section: str, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    if section == "model" and saved:
        saved, mine = _with_sizes(saved), _with_sizes(mine)
    for key, new in mine.items():
        old = saved.get(key, new)
        same = _base_names(old) == _base_names(new) if (section, key) == ("data", "train") else old == new
        if not same and (section, key) not in _NEUTRAL:
            yield key, old, new


def _with_sizes(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a ``model`` table with defaults for the fields that it lacks and its derived sizes filled in."""
    known = {f.name: table[f.name] for f in fields(ModelConfig) if f.name in table}
    try:
        for name, section in (("moe", MoEConfig), ("recurrent", RecurrentConfig)):
            if isinstance(known.get(name), dict):
                known[name] = section(**known[name])
        return as_dict(with_sizes(ModelConfig(**known)))
    except TypeError:  # a damaged value; it is named as it is
        return {**as_dict(ModelConfig()), **table}


def _base_names(prefixes: Any) -> list[str]:
    """Return base names: a copy of a corpus on a faster disk is the same corpus (contents are compared elsewhere)."""
    return [str(p).rstrip("/").rpartition("/")[2] for p in prefixes] if isinstance(prefixes, list) else []


def learning_rate_change(manifest: Manifest, config: RunConfig) -> str:
    """A line on the learning rate of the next update as the checkpoint's run had it and as this one has it, where the
    two differ; empty: they do not, or the checkpoint does not tell.
    """
    state = manifest.state
    before = state.schedule.get("learning_rate")
    if before is None:
        before = _rate_of(state)
    now = learning_rate(config.optimizer, state.step, config.training.steps)
    if not isinstance(before, (int, float)):
        return ""
    if not before and not now:  # a longer run that keeps the end of its schedule
        return (
            f"warning: the learning rate is 0 from step {state.step} on, so the weights stay as they are: "
            f"optimizer.decay_steps is {config.optimizer.decay_steps}; try --set "
            f"optimizer.decay_steps={config.training.steps}"
        )
    if before == now:
        return f"the learning rate continues at {now:.6g} (step {state.step})"
    if not before:
        return f"the learning rate jumps from 0 to {now:.4g} at step {state.step}"
    ratio = now / before
    jumps = ratio > JUMP or ratio < 1 / JUMP
    what = f"warning: the learning rate jumps by a factor of {ratio:.3g}" if jumps else "the learning rate changes"
    return f"{what} at step {state.step}: {before:.6g} -> {now:.6g}"


def _rate_of(state: SavedState) -> float | None:
    """Return the learning rate by the configuration of a checkpoint that does not hold the rate itself."""
    saved, known = _section(state, "optimizer"), {f.name for f in fields(OptimizerConfig)}
    training = _section(state, "training")
    try:
        optimizer = OptimizerConfig(**{k: v for k, v in saved.items() if k in known})
        return learning_rate(optimizer, state.step, int(training["steps"])) if saved else None
    except (KeyError, TypeError, ValueError, ZeroDivisionError, ConfigError):
        return None


def changes_since(manifest: Manifest, config: RunConfig, tokenizer: str | None, name: str) -> list[str]:
    """Return a line for each thing that determines training and has changed since the checkpoint ``name``."""
    state = manifest.state
    out = []
    different = changed_settings(manifest, config) if state.config_hash else []
    if not different and state.config_hash and state.config_hash != config_hash(config):
        different = [f"config hash {state.config_hash} -> {config_hash(config)}"]
    if different:
        out.append(f"note: other settings than when {name} was saved: {', '.join(different)}")
    others = other_changes(manifest, config) if state.config_hash else []
    if others:
        out.append(f"also changed since {name}: {', '.join(others)}")
    rate = learning_rate_change(manifest, config) if state.step else ""
    if rate:
        out.append(rate)
    saved = state.tokenizer.get("hash")
    if saved and tokenizer in OWN_TOKENIZERS and saved != _hash_of(tokenizer):
        out.append(
            f"note: {name} was trained with tokenizer {state.tokenizer.get('name')}, this run's data "
            f"are of {tokenizer}: its ids mean other text"
        )
    return out


def _section(state: SavedState, name: str) -> Mapping[str, Any]:
    saved = state.config.get(name, {}) if isinstance(state.config, dict) else {}
    return saved if isinstance(saved, dict) else {}


def check_data_fingerprint(checkpoint: Checkpoint, config: RunConfig, loaders: Loaders) -> list[str]:
    """Return a line for each difference, where differences are allowed: ``data.pinned`` is false, or
    ``checkpoint.resume`` names a checkpoint, so that this may be another run on other data. All ranks return the same.

    Raises:
        DataError: the data of this run has changed since its checkpoint.
    """
    state = checkpoint.manifest.state
    saved = state.data.get("corpora", []) if isinstance(state.data, dict) else []
    found = changes(saved if isinstance(saved, list) else [], loaders.data_fingerprint)
    before, now = str((state.tokenizer or {}).get("hash", "")), str(loaders.tokenizer.get("hash", ""))
    if before and now and before != now and not found:
        found.append(f"the tokenizer was {state.tokenizer.get('name')} ({before[:12]}), is "
                     f"{loaders.tokenizer.get('name')} ({now[:12]})")
    if not found:
        return []
    if config.data.pinned and config.checkpoint.resume == "auto":
        raise DataError(
            f"{checkpoint.path.name} was trained on other data under the same name: {'; '.join(found)}. Put the old "
            "files back, continue with the new ones by data.pinned = false, or start another run from it with "
            "checkpoint.resume = PATH and another name"
        )
    return [f"note: other data than when {checkpoint.path.name} was saved: {line}" for line in found]


def _hash_of(tokenizer: str) -> str:
    """Return the hash of one of the package's own tokenizers."""
    from megatron_port.ext.corpora.tokenizer import identity

    return str(identity(tokenizer)["hash"])
