"""TensorBoard events of the same numbers as metrics.jsonl. Optional: needs the tensorboard package."""

from __future__ import annotations

from pathlib import Path

from megatron_port.telemetry.metrics import Record

TAGS = {
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "learning_rate": "optimizer/learning_rate",
    "grad_norm": "optimizer/grad_norm",
    "loss_scale": "optimizer/loss_scale",
    "skipped_total": "optimizer/skipped_total",
    "samples": "progress/samples",
    "tokens": "progress/tokens",
    "tokens_per_second": "speed/tokens_per_second",
    "seconds": "speed/seconds_per_step",
    "model_tflops_per_device": "speed/model_tflops_per_device",
    "hardware_tflops_per_device": "speed/hardware_tflops_per_device",
    "mfu": "speed/mfu",
    "hfu": "speed/hfu",
    "memory_bytes": "memory/bytes",
}


class TensorBoardSink:
    """Writes scalars by step. Raises ImportError if TensorBoard is not installed.

    ``resumed_step``: events after it, of an attempt that ended later, are hidden by TensorBoard.
    """

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else None)

    def step(self, record: Record) -> None:
        """A training step."""
        at = int(record["step"] or 0)
        wall = record.get("time")
        for name, tag in TAGS.items():
            value = record.get(name)
            if value is not None:
                self._writer.add_scalar(tag, float(value), at, walltime=wall)

    def evaluation(self, record: Record) -> None:
        """An evaluation, shown at once."""
        self.step(record)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
