"""A SLURM of four nodes for the tests of this folder, whole again after each; skipped where none can be started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cluster import Cluster, start_cluster, start_directory, why_not


@pytest.fixture(scope="session")
def whole_cluster() -> Iterator[Cluster]:
    """Four nodes for the whole session. Tests take ``cluster``, which is this one without what others left."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with start_cluster(4) as cluster:
        yield cluster


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """Four idle nodes n1 to n4 with 8 (fake) GPUs and 64 (fake) cores each. After the test jobs and faults are gone."""
    yield whole_cluster
    whole_cluster.restore()


@pytest.fixture(scope="session")
def directory() -> Iterator[Cluster]:
    """384 Frontier nodes on paper with OLCF's limits: for ``sbatch --test-only``."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with start_directory(384) as cluster:
        yield cluster
