"""Options that the fuzz leaves as they are, and what shows that no random layout is missed by it.

An option that takes part in a step is drawn here or by another module of draws. What is left is read by nothing that a
step runs, or has no meaning where the ranks of these draws are. test_not_drawn.py checks each of these claims.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_port"
CHECKS = ("settings.py", "checks.py")
"""Files of a package that say what a feature contradicts: a check of a configuration reads them, no step."""
STEP = (
    "core/engine", "core/layers", "core/model", "core/optim", "core/pipeline", "ext/context", "ext/experts",
    "ext/kernels", "ext/memory", "ext/mixers", "ext/pipeline", "ext/rules", "ext/weights",
)
"""Packages of all that a rank runs between a micro-batch and the new weights."""

ELSEWHERE = {
    "experts": ("model.moe", "layout.expert_parallel_size"),
    "factored": ("model.shared_layers", "model.qkv_rank", "model.output_rank", "model.up_rank", "model.down_rank"),
    "mixers": ("model.mixer", "model.mixer_pattern", "model.mlp_pattern", "model.mlp_multipliers",
               "model.recurrent"),
    "distilled": ("distillation",), "compressed": ("sparsity", "quantisation"),
}
"""Module of draws with the same judge → the options or sections that it draws on random layouts, each compared with
one process."""
CONSTANT_THERE = {
    "distillation.logits": "a folder of stored logits, read as samples are (tests/e2e/test_teacher.py)",
}
"""Of these sections what those draws leave as it is."""

UNREAD = {
    "name": "a label", "output_dir": "a folder", "model.name": "a label", "model.family": "of exports",
    "activations.measure": "of the training loop", "activations.budget": "it only decides activations.layers, drawn",
    "layout.elastic": "chooses a layout before the run starts",
    "training.eval_batches": "of the loop", "training.eval_interval": "of the loop",
    "training.log_interval": "of the loop", "training.hooks": "of the loop, which plugins add to",
    "data.source": "of the loader: a plugin's samples", "data.tokenizer": "of the loader: eod_id",
    "data.pinned": "of resuming", "data.remote_cache": "of stores", "data.remote_cache_gb": "of stores",
    "fine_tuning.adapters": "a folder that the session reads", "plugins": "imported before a run is read",
    "checkpoint": "of saving and resuming", "telemetry": "of the loop", "watch": "of the loop",
    "cluster": "a description", "hardware": "a description", "calibration": "a description",
    "launch": "before the run", "preflight": "before the run",
}
"""Option or section → whose it is: nothing in ``STEP`` reads it, so no layout can compute anything else by it."""

OTHER_TESTS = {
    "training.loss": ("dpo, and what plugins bring", "distributed/test_preference_layouts.py"),
    "training.dpo_beta": ("with loss dpo", "distributed/test_preference_layouts.py"),
    "training.steps": ("the three of each draw, of which schedules take shares", "unit/test_schedules.py"),
    "precision.fp8": ("ranks scale their pieces by themselves: bounds of its own", "distributed/test_fp8_layouts.py"),
    "precision.grad_reduce_dtype": ("rounds between replicas, which one process lacks",
                                    "distributed/test_reduce_dtype.py"),
    "precision.max_skipped_steps": ("only stops a run", "unit/test_optim_loss_scale.py"),
    "data.document_length": ("counts operations", "unit/test_data_documents.py"),
    "moe": ("logs of routes, and their replay", "unit/test_routes.py"),
    "numerics": ("what is done about a value; a check computes none", "faults/test_numerics.py"),
    "backend.graphs": ("of GPUs; recorded steps run here on a stand-in", "distributed/test_recorded_steps.py"),
    "backend.device": ("the ranks of the draws have no GPU", "unit/test_backend_providers.py"),
    "layout.tp_exchange": ("with sequence parallelism alone", "distributed/test_exchanged.py"),
    "backend.tuned_products": ("of AMD GPUs", "unit/test_rocm_choices.py"),
    "backend.collective_priority": ("of NCCL and RCCL", "unit/test_stream_priority.py"),
    "backend.share_devices": ("of GPUs", "unit/test_backend_providers.py"),
    "backend.allow_jit": ("compiles for GPUs or not", "unit/test_backend_guard.py"),
    "backend.deterministic": ("of GPUs", "unit/test_backend_providers.py"),
    "backend.experts": ("with model.moe", "distributed/test_experts.py"),
    "backend.experts_exchange": ("with model.moe", "unit/test_exchange_providers.py"),
    "backend.quantise": ("only under precision.fp8", "kernels/test_quantise.py"),
    "backend.products": ("of GPUs", "kernels/test_lt_products.py"),
    "backend.scaled_mm": ("only under precision.fp8", "distributed/test_fp8_layouts.py"),
}
"""Option or section → why no draw has it, and the test file that sets it."""


def not_drawn() -> set[str]:
    """Return all options and sections that no seed of the fuzz changes."""
    return {*UNREAD, *OTHER_TESTS, *(name for names in ELSEWHERE.values() for name in names)}


AMBIGUOUS = ("name", "source", "watch")
"""Attributes that other objects have too: only those of a section called so, or of a run, are options."""


def reads(name: str) -> Iterator[str]:
    """Yield ``FILE:LINE OWNER.NAME`` of each place in ``STEP`` that may read an option or section: any attribute of
    its name, whatever the object is called that has it."""
    *section, last = name.split(".")
    owners = {section[-1]} if section else {"config", "run", "run_config", "c"}
    for where, owner, attribute in _attributes():
        if attribute == last and (last not in AMBIGUOUS or owner in owners):
            yield f"{where} {owner}.{attribute}"


@functools.cache
def _attributes() -> list[tuple[str, str, str]]:
    """Return (FILE:LINE, name of the owner, attribute) of all attributes in ``STEP``."""
    return [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", _called(node.value), node.attr)
        for package in STEP for path in sorted((PACKAGE / package).rglob("*.py")) if path.name not in CHECKS
        for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
    ]


def _called(value: ast.expr) -> str:
    """Return the last name of ``a.b`` or of ``b``; empty: something else, such as the result of a call."""
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
