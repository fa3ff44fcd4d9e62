"""A thousand damaged files: each is read or refused with one message, never more. ``make soak`` reads ten thousand."""

from __future__ import annotations

import pytest
from readers import TARGETS, fuzz


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_files(target: str) -> None:
    rows = list(fuzz(target, range(250)))
    assert len(rows) == 250
    findings = [row for row in rows if not row["ok"]]
    assert not findings, "\n".join(f"seed {row['seed']}: {row['result']}\n{row.get('detail', '')}" for row in findings)
    # Damage that everything refuses at the first byte would show nothing.
    assert sum(row["result"] == "read" for row in rows) >= 3
    assert sum(row["result"] == "refused" for row in rows) >= 50
