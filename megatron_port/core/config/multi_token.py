"""Settings that do not go with multi-token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_port.core.config.conflicts import Conflict, Table, native_only

if TYPE_CHECKING:
    from megatron_port.core.config.schema import RunConfig


def _too_short(config: RunConfig) -> list[str]:
    depths, length = config.model.mtp_layers, config.model.seq_length
    return [f"model.mtp_layers {depths} does not go with seq_length {length}: module {depths} would have no token to "
            f"predict; use at least {depths + 1}"] if length <= depths else []


CONFLICTS = (Table(
    asked="model.mtp_layers {c.model.mtp_layers}", on=lambda c: c.model.mtp_layers, link="does not go with", sized=True,
    rows=(
        # A positions table would be a further copy on the last stage.
        Conflict("model.position_embedding", use='use "rope"', allowed=("rope",)),
        native_only("whose loss is that of one set of logits", 'use "native"'),
        Conflict("backend.graphs", "each depth's number of tokens differs from step to step", 'use "off"',
                 allowed=("off",)),
        Conflict("precision.fp8", "in which it is not proved", 'use "none"', allowed=("none",)),
        Conflict("fine_tuning.method", "whose adapters are of the model's own layers", "use mtp_layers = 0",
                 allowed=("none",)),
    ), more=(_too_short,),
),)
