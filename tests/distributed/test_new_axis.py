"""A new axis of the mesh: what it takes to add one, shown by adding one here and training on it.

An axis of copies sees the same tokens; one that is part of ``dp`` sees others. Neither touches a file of the package
but the mesh: groups, ownership, the gradient norm, the loader's share and the check of replicas follow from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import pytest
from cases import LR, make_batches, make_config, providers_of, single_run
from pool import RankPool

from megatron_port.core.config.schema import RunConfig
from megatron_port.core.dist import mesh as mesh_module
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.mesh import Mesh, Topology
from megatron_port.ext.health.replicas import check_replicas
from megatron_port.run.build import build_engine
from megatron_port.tools.parity.comparison import FP64, Run, compare
from megatron_port.tools.parity.run_record import RankTrace, record_run

ORDER = ("tp", "cp", "dp_shard", "spare", "dp_replicate")
STEPS = 3


@contextmanager
def an_axis(*, of_tokens: bool) -> Iterator[None]:
    """The mesh with one more axis, which is part of data parallelism or not."""
    with pytest.MonkeyPatch.context() as patch:
        if of_tokens:
            patch.setitem(mesh_module.JOINED, "dp", ("dp_shard", "spare", "dp_replicate"))
            patch.setattr(mesh_module, "SETS", (*mesh_module.SETS, ("spare",)))
        yield


class Wider(Topology):
    """A layout with two ranks along the axis ``spare``."""

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks and their axes."""
        sizes = {"tp": self.tp, "dp_shard": self.dp, "spare": 2}
        return Mesh.of(sizes, pp=self.pp, order=ORDER)


def train(config: RunConfig, sizes: dict[str, int], of_tokens: bool) -> RankTrace:
    """Three steps on this rank, with its replicas compared."""
    with an_axis(of_tokens=of_tokens):
        ctx = ParallelContext.create(Wider(**cast(Any, sizes)), "cpu")
        try:
            engine = build_engine(config, ctx, providers_of(config))
            trace = record_run(engine, ctx, make_batches(config, ctx), steps=STEPS, lr=lambda step: LR)
            check_replicas(engine, ctx, step=STEPS)
            return trace
        finally:
            ctx.close()


def config_of(zero: int, sizes: dict[str, int]) -> RunConfig:
    layout: dict[str, Any] = {"zero_stage": zero, "sequence_parallel": sizes.get("tp", 1) > 1,
                              "pipeline_schedule": "1f1b"}
    return make_config(dtype="fp64", model={"num_layers": 3, "tie_embeddings": True}, layout=layout)


@pytest.mark.parametrize("of_tokens", [False, True], ids=["copies", "other tokens"])
@pytest.mark.parametrize(("sizes", "zero"), [({"dp": 2}, 1), ({"tp": 2}, 0), ({"pp": 2}, 2)], ids=str)
def test_a_run_over_a_new_axis_is_that_of_one_process(
    ranks: RankPool, sizes: dict[str, int], zero: int, of_tokens: bool
) -> None:
    config = config_of(zero, sizes)
    traces = ranks.run(4, train, config, sizes, of_tokens)
    alone = single_run(config, steps=STEPS)
    deviations = compare(alone, Run.of(traces), FP64, config.model, lr=LR)
    assert deviations and all(d.ok for d in deviations), "\n".join(str(d) for d in deviations if not d.ok)
