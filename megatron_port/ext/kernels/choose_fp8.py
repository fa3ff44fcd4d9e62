"""Choice of the 8-bit products on this device, where it has any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatron_port.core.config.schema import BackendConfig
from megatron_port.core.dist.rank import DeviceInfo
from megatron_port.core.errors import EnvironmentFault
from megatron_port.core.layers.providers import ProviderRow
from megatron_port.ext.kernels.choose import Candidate, Chooser
from megatron_port.ext.kernels.fp8 import (
    FNUZ,
    OCP,
    Formats,
    Fp8,
    Quantiser,
    ScaledMM,
    own_quantiser,
    quantise,
    reference_scaled_mm,
    torch_quantiser,
    torch_scaled_mm,
)

NEEDED = (8, 9)
"""Least compute capability of an NVIDIA GPU with 8-bit products."""
AMD = {"gfx942": FNUZ, "gfx950": OCP}
"""AMD's GPUs with 8-bit products."""
Describe = Callable[[torch.device], tuple[tuple[int, int], str]]


def describe_gpu(device: torch.device) -> tuple[tuple[int, int], str]:
    """Return (compute capability, AMD's architecture name without features, or empty)."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), str(getattr(properties, "gcnArchName", "")).split(":")[0]


def device_formats(device: DeviceInfo, describe: Describe = describe_gpu) -> tuple[Formats, str]:
    """Return (8-bit formats of the device, "") or (NVIDIA's, why the device has no products of them)."""
    if not device.is_gpu:
        return OCP, ""
    capability, architecture = describe(device.torch_device)
    if device.kind == "rocm":
        if architecture in AMD:
            return AMD[architecture], ""
        return OCP, f"{device.name} ({architecture}) has no 8-bit products; MI300 (gfx942) and later have"
    if capability < NEEDED:
        has = ".".join(map(str, capability))
        return OCP, f"{device.name} (compute capability {has}) has no 8-bit products; 8.9 and later have"
    return OCP, ""


def torch_problem(recipe: str, formats: Formats, device: torch.device) -> str:
    """Return why torch's scaled_mm cannot run a recipe on a device, or nothing. Tries small products."""
    try:
        for dtype, out in ((formats.precise, torch.bfloat16), (formats.wide, torch.float32)):
            if recipe == "rowwise" and dtype == formats.wide:
                continue
            ones = torch.ones(16, 32, device=device, dtype=torch.bfloat16)
            a, b = (quantise(ones, t, rowwise=recipe == "rowwise") for t in (dtype, formats.precise))
            bias = ones[0, :16] if out == torch.bfloat16 else None
            y = torch_scaled_mm(a, b, bias, out, bias is not None)  # fast where the recipes are
            if not bool((y == (33.0 if bias is not None else 32.0)).all()):
                return f"torch {torch.__version__} computes {recipe} 8-bit products wrongly on {device}"
    except (RuntimeError, ValueError, AttributeError) as error:  # AttributeError: a torch without scaled_mm
        said = str(error).strip().split("\n")[0].split(". ")[0]
        return f"torch {torch.__version__} has no {recipe} 8-bit products on {device}: {said or 'unknown'}"
    return ""


def choose_fp8(
    config: BackendConfig, recipe: str, device: DeviceInfo, describe: Describe = describe_gpu
) -> tuple[Fp8, ProviderRow]:
    """Return the products under precision.fp8 and their row of the table. ``recipe``: tensorwise | rowwise.

    The reference is never taken by itself: it is no faster than bf16, so a run that gets it should have asked.

    Raises:
        EnvironmentFault: the device or torch has no such products; the message says what to change.
    """
    formats, problem = device_formats(device, describe)
    if problem:
        raise EnvironmentFault(f'precision.fp8 = "{recipe}" cannot be used: {problem}; set precision.fp8 = "none"')
    asked = config.scaled_mm
    if asked not in ("auto", "torch", "reference"):
        raise EnvironmentFault(f'backend.scaled_mm = "{asked}" is not one of auto, torch, reference')
    names = ", ".join(str(d).removeprefix("torch.float8_") for d in (formats.precise, formats.wide))
    product: ScaledMM = reference_scaled_mm
    if asked != "reference":
        problem = torch_problem(recipe, formats, device.torch_device)
        if problem:
            raise EnvironmentFault(
                f'precision.fp8 = "{recipe}" cannot be used: {problem}; set precision.fp8 = "none", or for a test '
                'backend.scaled_mm = "reference"'
            )
        product, asked = torch_scaled_mm, "torch"
        why = f"{'auto' if config.scaled_mm == 'auto' else 'asked for'}; {recipe}, {names}"
        why += "" if device.is_gpu else "; a CPU multiplies them in fp32"
    else:
        why = f"asked for; {recipe}, {names}; for tests, in fp32"
    return Fp8(recipe, formats, product), ProviderRow("scaled_mm", asked, why)


def choose_quantiser(chooser: Chooser) -> tuple[Quantiser, ProviderRow]:
    """Choose the casts under precision.fp8. Raises EnvironmentFault."""
    return chooser.pick("quantise", [
        chooser.own(lambda: own_quantiser), Candidate("torch", "", lambda: torch_quantiser)
    ])


def choose_products(chooser: Chooser, recipe: str) -> tuple[Fp8, list[ProviderRow]]:
    """Return the products and casts under precision.fp8, and both rows of the table. Raises EnvironmentFault."""
    products, row = choose_fp8(chooser.config, recipe, chooser.device)
    quantiser, quantise_row = choose_quantiser(chooser)
    return dataclasses.replace(products, quantiser=quantiser), [quantise_row, row]
