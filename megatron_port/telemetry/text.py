"""Numbers as people read them."""

from __future__ import annotations

from megatron_port.charts.numbers import quantity
from megatron_port.telemetry.metrics import Record


def duration(seconds: float) -> str:
    """Return ``2 d 03:04:05`` or ``03:04:05``."""
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} d {clock}" if days else clock


def cells(record: Record) -> dict[str, str]:
    """Label → text of what a record knows, in the order of a console line. Unknown values have no entry."""
    known = {name: value for name, value in record.items() if value is not None}
    out: dict[str, str] = {}
    for field, label, form in (
        ("loss", "loss", "{:.4f}"),
        ("validation_loss", "validation loss", "{:.4f}"),
        ("learning_rate", "lr", "{:.3e}"),
        ("grad_norm", "grad norm", "{:.3f}"),
    ):
        if field in known:
            out[label] = form.format(known[field])
    if "loss_scale" in known and known["loss_scale"] != 1:
        out["loss scale"] = f"{known['loss_scale']:g}"
    if known.get("skipped"):
        out["skipped"] = "this step"
    if known.get("skipped_total"):
        out["skipped in total"] = str(known["skipped_total"])
    if "tokens" in known:
        out["tokens"] = quantity(int(known["tokens"]))
    if "tokens_per_second" in known:
        out["tokens/s"] = quantity(float(known["tokens_per_second"]))
    if "seconds" in known:
        out["s/step"] = f"{known['seconds']:.3f}"
    if "model_tflops_per_device" in known:
        out["model TFLOP/s"] = f"{known['model_tflops_per_device']:.4g}"
    if "mfu" in known:
        out["MFU"] = f"{100 * known['mfu']:.1f} %"
    if "hfu" in known:
        out["HFU"] = f"{100 * known['hfu']:.1f} %"
    if "memory_bytes" in known:
        out["memory"] = f"{quantity(int(known['memory_bytes']))}B"
    return out
