"""Matrix products by the cublasLt or hipBLASLt that torch has loaded, with what follows a product as its epilogue.

out [r, c] = left [r, k] right [k, c], summed in fp32. Operands are fp16 or bf16, row-major or transposed views of such;
out is contiguous, of their dtype or float32. Descriptors, layouts and the algorithms that the library's heuristic names
are kept by shape, dtype, alignment and epilogue (``kernels/binding/lt_library.h``): it is asked once for each, and a
product after that costs two calls. A candidate is the place of an algorithm in the heuristic's order.

Nothing here is differentiable: linear layers call it from their own forward and backward passes.
"""

from __future__ import annotations

import ctypes
import functools
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from megatron_port.ext.kernels import kernels

CPU, GPU = 0, 1
"""Sides: tensors of a CPU, for which only tests have a library, and of a GPU."""


class Epilogue(IntEnum):
    """Operation that follows a product (``mp_epilogue``). ``vector`` is [c], ``aux`` has the form and dtype of out."""

    PLAIN = 0
    BIAS = 1
    """vector is added to each row."""
    GELU_AUX_BIAS = 2
    """vector is added to each row; the sum is written to aux, and its GeLU in the tanh form to out."""
    DGELU = 3
    """Product times the derivative of that GeLU at aux."""
    DGELU_BGRAD = 4
    """Product times the derivative of that GeLU at aux, whose sum over rows is written to vector."""


def product(
    left: Tensor, right: Tensor, out: Tensor, *, adds: bool = False, candidate: int = 0,
    epilogue: Epilogue = Epilogue.PLAIN, vector: Tensor | None = None, aux: Tensor | None = None,
) -> None:
    """Write left right to ``out``, or add it to what ``out`` holds (``adds``), then apply the epilogue.

    Raises:
        RuntimeError: no library is open, the tensors do not fit one another, or there is no such candidate.
    """
    torch.ops.megatron_port.lt_product.default(left, right, out, vector, aux, int(epilogue), adds, candidate)


def candidates(
    left: Tensor, right: Tensor, out: Tensor, *, epilogue: Epilogue = Epilogue.PLAIN, vector: Tensor | None = None,
    aux: Tensor | None = None,
) -> int:
    """Return how many algorithms, at most 8, the library names for such a product. 0: it cannot compute it.

    Raises RuntimeError as :func:`product` does.
    """
    found: int = torch.ops.megatron_port.lt_candidates.default(left, right, out, vector, aux, int(epilogue))
    return found


def _binding() -> ctypes.CDLL:
    library = ctypes.CDLL(str(kernels.FOLDER / kernels.BINDING))
    library.megatron_port_lt_open.restype = library.megatron_port_lt_name.restype = ctypes.c_char_p
    library.megatron_port_lt_open.argtypes = [ctypes.c_char_p, ctypes.c_int32]
    library.megatron_port_lt_version.restype = library.megatron_port_lt_asked.restype = ctypes.c_int64
    return library


def open_library(side: int = GPU, path: Path | None = None) -> str:
    """Open the library that torch has loaded, or a file; return why there is none, or nothing.

    ``kernels.load`` must have run, for any device. A call for a side whose library is open opens it anew.
    """
    _register_shapes()
    wrong: bytes | None = _binding().megatron_port_lt_open(None if path is None else str(path).encode(), side)
    return "" if wrong is None else wrong.decode()


def library_name(side: int = GPU) -> str:
    """Return name and version of the open library, ``cublasLt 130100``; empty: none is open."""
    binding = _binding()
    name: bytes | None = binding.megatron_port_lt_name(side)
    return "" if name is None else f"{name.decode()} {binding.megatron_port_lt_version(side)}"


def times_asked(side: int = GPU) -> int:
    """Return how often the open library was asked for algorithms: once for each new form of a product."""
    asked: int = _binding().megatron_port_lt_asked(side)
    return asked


def close_library(side: int = GPU) -> None:
    """Close the library of a side."""
    _binding().megatron_port_lt_close(side)


def _product_shapes(
    left: Tensor, right: Tensor, out: Tensor, vector: Tensor | None, aux: Tensor | None, epilogue: int, adds: bool,
    candidate: int,
) -> None:
    return None


@functools.cache
def _register_shapes() -> None:
    """Shapes of the op, in torch's registry. Once a process, and not with the other ops: few runs open the library."""
    torch.library.register_fake("megatron_port::lt_product", _product_shapes)
