"""The numbers of a step: the package's own, and those that plugins declare (no torch).

docs/metrics.md is made of this table. An objective, an optimizer rule or a hook of the loop declares its own where it
makes the number::

    declare(Metric("weight_norm", float, label="weight norm", chart="Weight norm", help="L2 norm of all weights."))

Then the console, metrics.jsonl, TensorBoard and the trackers, the report and the live page show it. Reports are made by
other processes, which import no plugin: they read the declarations from the run's folder (``telemetry.metrics``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_port.core.errors import ConfigError
from megatron_port.core.registry import Registry

# Declaration of a number that each step of a run has; every output that shows it follows (no torch).

FORM = re.compile(r"[^{}]*(\{(:,?(\.\d{1,2})?[efgd%]?)?\}[^{}]*)?")
"""What a form may be: text around one value, with a precision of at most two digits."""
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
Summary = Literal["", "last", "mean", "max"]


@dataclass(frozen=True)
class Chart:
    """A chart of the report and of the live page, of all metrics that name it."""

    title: str
    """With the unit."""
    zero: bool = False
    """The axis begins at 0."""
    form: str = ""
    """Form of the axis's numbers, as :attr:`Metric.form`; empty: four digits."""
    varies: bool = False
    """Drawn only where the values differ."""


@dataclass(frozen=True)
class Metric:
    """One number of a step's line in metrics.jsonl.

    Raises:
        ConfigError: a name or a form that it cannot have.
    """

    name: str
    """Field of metrics.jsonl: small letters, digits and ``_``."""
    type: type
    """float, int or bool."""
    unit: str = ""
    """Unit of the value as it is written."""
    label: str = ""
    """In the console's lines; empty: it is not there."""
    chart: Chart | str = ""
    """Chart that draws it, or the title of one of its own; empty: none."""
    help: str = ""
    """Definition, as docs/metrics.md has it (Markdown)."""
    form: str | Callable[[Mapping[str, Any]], str] = "{:.4g}"
    """How a person reads it: a format of the value times ``factor``, ``quantity`` (12.3k), ``bytes``, or a function of
    the step's whole record."""
    factor: float = 1.0
    """What the value is multiplied by where people read it: 100 for percent."""
    tag: str | None = ""
    """Name in TensorBoard and the trackers; empty: ``name``; None: it is not there."""
    hidden: float | bool | None = None
    """Value that the console leaves out."""
    curve: str = ""
    """Name of its line where several share a chart."""
    summary: Summary = ""
    """What the report's table says of a whole run: its last value, mean or maximum; empty: nothing. The package's own
    facts are in ``telemetry.run_facts``."""

    def __post_init__(self) -> None:
        bad = "" if NAME.fullmatch(self.name) else f"the name {self.name!r} is not of small letters, digits and '_'"
        if self.type not in (float, int, bool):
            bad = f"{self.name!r} is of type {self.type!r}; use float, int or bool"
        for form in (self.form, self.drawn.form if self.drawn else ""):
            if isinstance(form, str) and form not in ("quantity", "bytes") and not FORM.fullmatch(form):
                bad = f"the form {form!r} of {self.name!r} is none; use e.g. '{{:.4g}}', quantity or bytes"
        if bad:
            raise ConfigError(f"metric: {bad}")

    @property
    def drawn(self) -> Chart | None:
        """Chart that draws it."""
        if isinstance(self.chart, Chart):
            return self.chart
        return Chart(self.chart, form=self.form if isinstance(self.form, str) else "") if self.chart else None


LOSS = Chart("Loss (nats per token)")
RATE = Chart("Learning rate", zero=True)
NORM = Chart("Gradient norm")
TOKENS = Chart("Tokens/s", zero=True)
TFLOPS = Chart("TFLOP/s per device", zero=True)
PEAK = Chart("Share of peak, model (MFU, %)", zero=True)
SECONDS = Chart("Seconds per step", zero=True)
MEMORY = Chart("Memory of the reporting rank", zero=True, form="bytes")
SCALE = Chart("Loss scale", varies=True)
REWARD = Chart("Reward")
CHARTS = (LOSS, REWARD, RATE, NORM, TOKENS, TFLOPS, PEAK, SECONDS, MEMORY, SCALE)
"""In the order of the report."""


def _expert_load(record: Mapping[str, Any]) -> str:
    """Return the range of the experts' load, and the share of dropped tokens where there are any."""
    lost = f", {100 * record['dropped_share']:.1f} % dropped" if record.get("dropped_share") else ""
    return f"{record['expert_load_min']:.2f} to {record['expert_load_max']:.2f}{lost}"


OWN: tuple[Metric, ...] = (
    Metric(
        "step", int, unit="steps", tag=None,
        help="Number of optimizer steps done, this one included; the first line has 1. The learning-rate schedule "
             "counts from 0, so this line's rate is that of schedule step `step - 1`. 0 occurs only in an evaluation "
             "before training. Skipped steps count.",
    ),
    Metric(
        "loss", float, unit="nats per token", label="loss", form="{:.4f}", chart=LOSS, tag="loss/train",
        help="Mean over all loss tokens of the global batch, before the update. Nats per token. Absent if every label "
             "of the batch is masked. The gradient is then 0 (`grad_norm` too), and the update is AdamW's at a zero "
             "gradient, as in Megatron-LM.",
    ),
    Metric(
        "mtp_loss", float, unit="nats per token", label="further tokens", form="{:.4f}", tag="loss/mtp",
        help="Loss of multi-token prediction (`model.mtp_layers`): the mean loss of each depth over its own tokens of "
             "the global batch, averaged over the depths. Nats per token. It is not part of `loss`. A depth without "
             "tokens is left out. Absent without the modules.",
    ),
    Metric(
        "chosen_reward", float, unit="nats per pair", tag="rewards/chosen",
        help='With `training.loss = "dpo"` ([preferences.md](preferences.md)): `training.dpo_beta` times the '
             "log-probability of the chosen answer minus that of the reference, averaged over the pairs of the global "
             "batch, before the update. `loss` is then a mean over these pairs, in nats per pair, and so is "
             "`validation_loss`.",
    ),
    Metric(
        "reward_margin", float, unit="nats per pair", label="reward margin", form="{:.4f}", tag="rewards/margin",
        help="`chosen_reward` minus the same for the rejected answers.",
    ),
    Metric(
        "reward_accuracy", float, label="accuracy", form="{:.3f}", tag="rewards/accuracy",
        help="Share of these pairs whose own margin is above 0.",
    ),
    Metric(
        "log_odds_ratio", float, label="log odds ratio", form="{:.4f}", tag="rewards/log_odds_ratio",
        help='With `training.loss = "orpo"`: mean log of the ratio of the odds of the chosen and the rejected answer.',
    ),
    Metric(
        "reward", float, label="reward", form="{:.3f}", chart=REWARD, tag="rewards/mean",
        help='With `training.loss = "policy"` ([post-training.md](post-training.md)): mean reward of the step\'s '
             "answers. `loss` is then the policy's, a mean as `policy.method` says.",
    ),
    Metric("answer_tokens", float, unit="tokens", tag="rewards/answer_tokens",
           help="Mean number of sampled tokens of these answers."),
    Metric("policy_ratio", float, tag="policy/ratio",
           help="Mean ratio of the new and the old policy over these tokens."),
    Metric("policy_clipped", float, tag="policy/clipped", help="Share of these tokens whose ratio was clipped."),
    Metric("policy_kl", float, unit="nats per token", tag="policy/kl",
           help="KL of the old policy and the new one, estimated by exp(d) - d - 1 with d = old - new."),
    Metric("policy_reference_kl", float, unit="nats per token", tag="policy/reference_kl",
           help="The same of the reference, where `policy.kl` is not 0."),
    Metric("policy_entropy", float, unit="nats per token", label="entropy", form="{:.3f}", tag="policy/entropy",
           help="Mean entropy of the predictions of these tokens, where `policy.entropy` is not 0."),
    Metric(
        "cross_entropy", float, unit="nats per token", label="CE", form="{:.4f}", tag="loss/cross_entropy",
        help="With a teacher ([compression.md](compression.md#learning-from-a-teacher)): the part of `loss` that is of "
             "the data, mean over the global batch's loss tokens before the update.",
    ),
    Metric(
        "teacher_kl", float, unit="nats per token", label="KL", form="{:.4f}", tag="loss/teacher_kl",
        help="KL of the teacher and the model, likewise, without the factor T².",
    ),
    Metric(
        "learning_rate", float, label="lr", form="{:.3e}", chart=RATE, tag="optimizer/learning_rate",
        help="Rate of this update by the schedule, whether or not the update was skipped.",
    ),
    Metric(
        "grad_norm", float, label="grad norm", form="{:.3f}", chart=NORM, tag="optimizer/grad_norm",
        help="L2 norm of the whole gradient before clipping, without loss scale and batch weighting. Each logical "
             "parameter counts once. Absent if it is not finite.",
    ),
    Metric(
        "loss_scale", float, label="loss scale", form="{:g}", hidden=1.0, chart=SCALE, tag="optimizer/loss_scale",
        help="Factor of this step's backward pass. 1 unless the precision is fp16.",
    ),
    Metric(
        "skipped", bool, label="skipped", form="this step", hidden=False, tag=None,
        help="This update was not applied: fp16 overflow, or an anomaly (below).",
    ),
    Metric(
        "skipped_total", int, unit="steps", label="skipped in total", form="{}", hidden=0,
        tag="optimizer/skipped_total",
        help="Updates not applied since the start of training, across resumes.",
    ),
    Metric(
        "anomalies_total", int, unit="steps", tag=None,
        help="Steps since the start of training, across resumes, whose loss or gradient could not be trusted "
             "(`[numerics]`). A step that runs again after a rewind counts again. fp16 overflow under a finite loss "
             "does not count.",
    ),
    Metric(
        "samples", int, unit="samples", tag="progress/samples",
        help="Samples consumed since the start of training, this step and skipped steps included.",
    ),
    Metric(
        "tokens", int, unit="tokens", label="tokens", form="quantity", tag="progress/tokens",
        help="Tokens consumed since the start of training: samples times sequence length, masked ones included.",
    ),
    Metric(
        "tokens_per_second", float, unit="tokens/s", label="tokens/s", form="quantity", chart=TOKENS,
        tag="speed/tokens_per_second",
        help="Tokens of this step divided by `seconds`, over all devices.",
    ),
    Metric(
        "seconds", float, unit="s", label="s/step", form="{:.3f}", chart=SECONDS, tag="speed/seconds_per_step",
        help="Wall time of the step, from the fetch of its data to the end of its update. In an evaluation line: of "
             "the evaluation.",
    ),
    Metric(
        "model_tflops_per_device", float, unit="TFLOP/s", label="model TFLOP/s", form="{:.4g}", chart=TFLOPS,
        curve="model", tag="speed/model_tflops_per_device",
        help="Floating-point operations (10^12) that the model needs for this step's tokens, forward and backward, "
             "divided by `seconds` and the number of devices. They follow the formula of Narayanan et al. (arXiv "
             "2104.04473), without recomputation. Attention counts all s² scores of a sample; under "
             '`data.attention_documents = "within"`, it counts s times the mean length of the document that a token '
             "is in (`data.document_length`; if 0, that of the run's first 512 samples).",
    ),
    Metric(
        "hardware_tflops_per_device", float, unit="TFLOP/s", chart=TFLOPS, curve="hardware",
        tag="speed/hardware_tflops_per_device",
        help="The same with the operations of recomputation: what the devices actually computed.",
    ),
    Metric(
        "mfu", float, label="MFU", form="{:.1f} %", factor=100.0, chart=PEAK, tag="speed/mfu",
        help="`model_tflops_per_device` divided by `cluster.peak_tflops`, a fraction (Chowdhery et al., arXiv "
             "2204.02311). Absent if the peak is not known.",
    ),
    Metric(
        "hfu", float, label="HFU", form="{:.1f} %", factor=100.0, tag="speed/hfu",
        help="`hardware_tflops_per_device` divided by `cluster.peak_tflops`, a fraction.",
    ),
    Metric(
        "memory_bytes", int, unit="bytes", label="memory", form="bytes", chart=MEMORY, tag="memory/bytes",
        help="Largest memory allocated on the reporting rank's device so far (on a CPU: largest resident size of its "
             "process).",
    ),
    Metric(
        "fragmentation_bytes", int, unit="bytes", tag="memory/fragmentation_bytes",
        help="Memory that the reporting rank's device allocator has reserved so far beyond `memory_bytes`: holes, and "
             "blocks kept for later (GPUs only).",
    ),
    Metric(
        "expert_load_max", float, label="expert load", form=_expert_load, tag="experts/load_max",
        help="Tokens of the most loaded expert ÷ the mean of its layer's experts, in the layer where this is largest. "
             "1 means that all are equal; E / k is the maximum. Counted before any token is dropped, over the global "
             "batch. This and the next six fields exist only if layers have experts ([moe.md](moe.md)).",
    ),
    Metric(
        "expert_load_min", float, tag="experts/load_min",
        help="The same for the least loaded expert, in the layer where this is smallest.",
    ),
    Metric(
        "experts_low", int, tag="experts/low",
        help="Experts with less than a tenth of their layer's mean, over all layers.",
    ),
    Metric(
        "dropped_share", float, tag="experts/dropped_share",
        help="Dropped choices as a share of all choices (tokens × k) of all layers. A choice is dropped if the expert "
             "is at its capacity, or if GShard's second expert is not drawn. Absent if none can be dropped.",
    ),
    Metric(
        "router_margin", float, tag="experts/router_margin",
        help="How close the choice is to another one: the gap between the k-th and the next score of a token, averaged "
             "over tokens and layers.",
    ),
    Metric(
        "balance_loss", float, tag="experts/balance_loss",
        help="Balance loss without its weight, averaged over samples and layers. Absent if there is none.",
    ),
    Metric(
        "z_loss", float, tag="experts/z_loss",
        help="Mean square of the logits' log-sum-exp without its weight, averaged over tokens and layers. Absent if "
             "there is none.",
    ),
    Metric(
        "validation_loss", float, unit="nats per token", label="validation loss", form="{:.4f}",
        tag="loss/validation",
        help="Mean over all loss tokens of the evaluation's samples, dropout off, after `step` updates. Nats per "
             "token. Each sample of the first `training.eval_batches` global batches of the split counts once. The "
             "last batch of the split may be smaller; it is padded to full micro-batches with masked samples. So the "
             "number is the same for every micro-batch size and layout. A blend of corpora is mixed until the first "
             "of them is exhausted; then the rest of the others follows. NaN if no token counts.",
    ),
    Metric(
        "time", float, unit="s", tag=None,
        help="When the line was written: seconds since 1970-01-01 UTC.",
    ),
)
"""In the order in which a line of metrics.jsonl holds them."""
METRICS = Registry("metric", "metrics.jsonl", dict.fromkeys(metric.name for metric in OWN))
"""Names of all metrics; :func:`declare` adds to them."""


def declare(*metrics: Metric) -> None:
    """Add metrics to those that a step may record. Call it where the module is imported.

    Raises:
        ConfigError: a name is taken.
    """
    for metric in metrics:
        METRICS.add(metric.name, metric)


def declared_metrics() -> tuple[Metric, ...]:
    """Return the metrics that plugins have declared in this process, in their order."""
    return tuple(METRICS.get(name, Metric) for name in METRICS.added)


def step_metrics(more: Iterable[Metric] = ()) -> dict[str, Metric]:
    """Return all metrics by name: the package's own, those declared in this process, and ``more``."""
    found = {metric.name: metric for metric in (*OWN, *declared_metrics())}
    return found | {metric.name: metric for metric in more if metric.name not in found}
