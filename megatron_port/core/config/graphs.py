"""Settings that contradict recorded steps: all that needs the host in a step, or differs between steps in more than
numbers."""

from __future__ import annotations

from megatron_port.core.config.conflicts import Conflict, Rule, Table, native_only

CONFLICTS = (Table(
    asked='backend.graphs "step"', on=lambda c: c.backend.graphs != "off", end=' (or graphs = "off")', rows=(
        native_only("whose step the host drives"),
        Conflict("backend.device", "where nothing is launched", "use a GPU", refused=("cpu",)),
        Conflict("backend.share_devices", "whose collectives go through the host"),
        Conflict("layout.zero_stage", "whose weights are gathered and freed by the host", "use 0, 1 or 2",
                 refused=(3,)),
        Conflict("offload.optimizer", "the host updates", allowed=("none",)),
        Conflict("activations.policy", "by which tensors may be swapped", "give activations.layers, or use another",
                 allowed=("none", "selective", "full"), when=lambda c: not c.activations.layers),
        Rule(lambda c: any(":swap" in sites for sites in c.activations.layers),
             "{asked} with activations.layers with :swap, whose copies the host drives; recompute or keep these sites"),
        Conflict("optimizer.name", "only AdamW has an update that the host does not decide", allowed=("adamw",)),
        Conflict("backend.optimizer", "the host decides on its updates", "use own or auto", allowed=("auto", "own")),
        Conflict("precision.dtype", "which the own optimizer kernel does not take", refused=("fp64",)),
        Conflict("batch.rampup_start", "the number of micro-batches changes"),
        Rule(lambda c: c.data.attention_documents == "within" and c.backend.attention not in ("sdpa", "math"),
             '{asked} with data.attention_documents "within" and backend.attention "{c.backend.attention}": flash-attn '
             'takes the lengths of documents from the host; use attention = "sdpa" or "math"'),
        Conflict("numerics.replay_interval", "a replay looks at every micro-batch from the host", "use 0"),
    ),
),)
