"""What tables of conflicts (``config.conflicts``) find in one configuration."""

from __future__ import annotations

from megatron_port.core.config.conflicts import Table
from megatron_port.core.config.schema import RunConfig


def contradictions(tables: tuple[Table, ...], config: RunConfig) -> list[str]:
    """A sentence for each row that applies, over all tables."""
    return [text for table in tables for text in table.problems(config)]
