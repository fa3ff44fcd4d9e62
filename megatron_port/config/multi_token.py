"""Which settings multi-token prediction fits together with."""

from __future__ import annotations

from megatron_port.config.schema import RunConfig


def mtp_problems(config: RunConfig) -> list[str]:
    """Name the settings that do not go with multi-token prediction."""
    m = config.model
    if not m.mtp_layers:
        return []
    # A positions table would be a further copy on the last stage.
    found = {
        f'position_embedding "{m.position_embedding}"; use "rope"': m.position_embedding != "rope",
        f"seq_length {m.seq_length}: module {m.mtp_layers} would have no token to predict; use at least "
        f"{m.mtp_layers + 1}": m.seq_length <= m.mtp_layers,
        f'engine "{config.engine}", whose loss is that of one set of logits; use "native"': config.engine != "native",
        f'backend.graphs "{config.backend.graphs}": each depth\'s number of tokens differs from step to step; use '
        '"off"': config.backend.graphs != "off",
        f'precision.fp8 "{config.precision.fp8}", in which it is not proved; use "none"':
            config.precision.fp8 != "none",
        f'fine_tuning.method "{config.fine_tuning.method}", whose adapters are of the model\'s own layers; use '
        "mtp_layers = 0": config.fine_tuning.enabled,
    }
    return [f"model.mtp_layers {m.mtp_layers} does not go with {what}" for what, there in found.items() if there]
