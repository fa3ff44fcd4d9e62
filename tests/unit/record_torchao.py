"""Record what torchao's 8-bit codec and AdamW8bit make of given numbers: ``torchao_codec.json`` beside this file.

``python tests/unit/record_torchao.py``, where torchao is installed (no dependency of the project; 0.18.0 was).
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

RECORD = Path(__file__).parent / "torchao_codec.json"
BLOCK, ROWS, COLUMNS, STEPS = 128, 32, 256, 3
HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def blocks() -> np.ndarray:
    """Six blocks: of several sizes, long-tailed, zeros, with equals and extremes. float32 [6, 128]."""
    x = np.random.default_rng(11).standard_normal((6, BLOCK)).astype(np.float32)
    x *= np.array([1.0, 1e-3, 1e-9, 30.0, 1.0, 0.0], dtype=np.float32)[:, None]
    x[4] = x[4] ** 7
    x[0, :5] = (5.0, -5.0, 0.0, 2.5, -2.5)
    return x


def weights_and_gradients() -> tuple[np.ndarray, list[np.ndarray]]:
    """A parameter [32, 256], and its gradients in three steps."""
    random = np.random.default_rng(12)
    start = random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    return start, [
        (0.1 * (k + 1) * random.standard_normal((ROWS, COLUMNS))).astype(np.float32) for k in range(STEPS)
    ]


def main() -> None:
    """Write the record."""
    import torch

    torch.compile = lambda function=None, **_: function or (lambda f: f)  # type: ignore[assignment]  # eager
    version = import_module("torchao").__version__
    adamw_8bit, codec = import_module("torchao.optim").AdamW8bit, import_module("torchao.optim.quant_utils")
    out: dict[str, Any] = {"torchao": version, "torch": torch.__version__}
    for name, x in (("signed", torch.from_numpy(blocks())), ("unsigned", torch.from_numpy(blocks()) ** 2)):
        values = torch.tensor(codec.create_dynamic_map(name == "signed"))
        relative, scale = codec.scale_tensor(x, BLOCK)
        codes = codec.quantize_8bit_with_qmap(relative, values)
        out[name] = {
            "values": values.tolist(), "codes": codes.numpy().tobytes().hex(), "scale": scale.tolist(),
            "dequantised": codec.dequant_with_qmap(codes, values, scale).flatten().tolist(),
        }
    start, gradients = weights_and_gradients()
    parameter = torch.nn.Parameter(torch.from_numpy(start))
    optimizer = adamw_8bit([parameter], block_size=BLOCK, **HYPER)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    for kind in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[parameter][kind]
        out[kind] = {"codes": state.codes.numpy().tobytes().hex(), "scale": state.scale.tolist()}
    out["row"] = parameter.detach()[5].tolist()
    RECORD.write_text(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
