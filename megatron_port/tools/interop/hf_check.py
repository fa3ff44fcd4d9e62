"""Do transformers' model of a folder and ours compute the same logits? Asked of every export, and of every import.

Both run in fp32 on the same random tokens, layer by layer: at any time a process holds the weights of one layer (here)
or of one module (there). All matrices and biases are multiplied by 5 first. At the usual 0.02 of fresh weights even a
wrong activation changes the logits by 1e-5 only, which looks like rounding; five times that shows it. A trained model
may be so sharp that rounding alone moves its scaled logits by more than the tolerance: that is measured, by our model
in fp64, and the scale is then lowered to 2 or 1.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from megatron_port.core.checkpoint.reader import Checkpoint
from megatron_port.core.config.schema import LayoutConfig, ModelConfig
from megatron_port.core.dist.collectives import recorded_buffers
from megatron_port.core.dist.groups import ParallelContext
from megatron_port.core.dist.record import BUFFER, StateReader, record_of
from megatron_port.core.engine.module import read_local
from megatron_port.core.errors import CheckpointError, EnvironmentFault
from megatron_port.core.layers.dropout import DropoutStream
from megatron_port.core.layers.providers import torch_providers
from megatron_port.core.layers.step import StepSlot
from megatron_port.core.model.build import BuildContext
from megatron_port.core.model.decoder_spec import model_spec
from megatron_port.core.model.layers import Embedding, Head, TransformerLayer
from megatron_port.ext.experts.spec import LAST_STEP
from megatron_port.ext.telemetry.flops import parameter_count
from megatron_port.tools.interop.hf_files import HFFolder, loaded_by, norm_weights, scaled_logits, their_logits
from megatron_port.tools.interop.unpickle import check_size

TOLERANCE = 1e-6
SCALES = (5.0, 2.0, 1.0)
SAMPLES, LENGTH = 2, 48
_LARGE = 4 << 30
"""Bytes of a model in fp32 from which the check of an import is announced."""


@dataclass(frozen=True)
class Agreement:
    """Result of the check: ``deviation`` is max|Δ| ÷ max|logit|."""

    deviation: float
    tolerance: float
    scale: float
    rounding: float
    """Deviation of our model in fp32 from fp64."""
    version: str
    """Version of transformers."""

    def line(self) -> str:
        """For the console."""
        return (
            f"logits against transformers {self.version}: max|Δ| / max|logit| = {self.deviation:.1e} "
            f"(tolerance {self.tolerance:.1e}, weights × {self.scale:g}, fp32)"
        )

    def card(self) -> str:
        """For the model card."""
        return (
            f"The logits of this folder in transformers {self.version} and of the checkpoint in megatron_port differ "
            f"by max|Δ| ÷ max|logit| = **{self.deviation:.2e}** (tolerance {self.tolerance:.1e}): {SAMPLES} × {LENGTH} "
            f"random tokens at most, fp32, weights × {self.scale:g}. Rounding alone (fp32 against fp64): "
            f"{self.rounding:.2e}."
        )


def deviation(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| ÷ max|b|; NaN where either is not finite."""
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().max())


def check_export(checkpoint: Checkpoint, model: ModelConfig, folder: Path, *, dtype: torch.dtype) -> Agreement:
    """Run both models. ``dtype``: of the exported weights; ours are rounded to it too.

    Raises:
        CheckpointError: the logits differ by more than the tolerance.
        EnvironmentFault: transformers is not installed.
    """
    transformers = import_transformers()
    tokens = _tokens(model)

    def rounded(
        name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...], /, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return checkpoint.read(name, kind, offset, shape).to(torch.float32 if kind == BUFFER else dtype)

    ours, scale, rounding = _scaled(rounded, model, tokens)
    theirs = their_logits(transformers, folder, tokens, scale=scale)
    tolerance = max(TOLERANCE, 2 * rounding)  # transformers' rounding depends on the processor's vectors as ours does
    found = Agreement(deviation(ours, theirs), tolerance, scale, rounding, transformers.__version__)
    if not found.deviation <= tolerance:  # NaN as well
        raise CheckpointError(
            f"{folder}: transformers' logits differ from ours by max|Δ| / max|logit| = {found.deviation:.2e}, above "
            f"{tolerance:.1e} (fp32, weights × {scale:g}; rounding alone is {rounding:.1e}). Nothing was exported"
        )
    return found


def check_import(folder: HFFolder, note: Callable[[str], None]) -> Agreement | None:
    """Run our model of a Hugging Face folder and the one that transformers itself loads from it. None: they could not
    be compared, and a line was noted that says why.

    Raises:
        CheckpointError: the logits differ by more than rounding explains.
    """
    need, free = 4 * parameter_count(folder.model), free_memory()
    if need > free:
        note(
            f"not compared with transformers, whose model takes {need / 1e9:.1f} GB in fp32; only {free / 1e9:.1f} GB "
            "are free"
        )
        return None
    try:
        transformers = import_transformers()
        network = loaded_by(transformers, folder.path)
    except EnvironmentFault:
        note("not compared with transformers, which is not installed here (pip install transformers)")
        return None
    except Exception as error:  # whatever its loader finds wrong with the folder
        what = f"{type(error).__name__}: {error!s:.300}"
        note(f"not compared with transformers, which does not load {folder.path}: {what}")
        return None
    if need > _LARGE:
        note("comparing logits with transformers', which takes minutes for such a model; --skip-check leaves it out")
    tokens = _tokens(folder.model)
    ours, scale, rounding = _scaled(folder.read, folder.model, tokens)
    theirs = scaled_logits(network, folder, tokens, scale=scale)
    tolerance = max(TOLERANCE, 4 * rounding)
    found = Agreement(deviation(ours, theirs), tolerance, scale, rounding, transformers.__version__)
    if not found.deviation <= tolerance:  # NaN as well
        raise CheckpointError(
            f"{folder.path}: transformers {found.version} computes other logits from it than our model does, by "
            f"max|Δ| / max|logit| = {found.deviation:.2e}, above {tolerance:.1e} (fp32, weights × {scale:g}; rounding "
            f"alone is {rounding:.1e}). Nothing was imported; --skip-check imports it all the same"
        )
    return found


def free_memory(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: of the machine's memory, and of the limits of its groups (a job's, a
    container's; cgroup v2), in which pages of files count as free."""
    free: int = psutil.virtual_memory().available
    try:
        inside = next(line[3:].strip("/") for line in proc.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return free
    for folder in (root / inside, *(root / inside).parents):
        try:
            limit = int((folder / "memory.max").read_text())
            used = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, limit - int(used["anon"]))
        except (OSError, ValueError, KeyError):  # no such group, or "max": no limit
            continue
    return free


def _tokens(model: ModelConfig) -> torch.Tensor:
    """Return random tokens, [samples, tokens]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.vocab_size, (SAMPLES, min(LENGTH, model.seq_length)), generator=generator)


def _scaled(read: StateReader, model: ModelConfig, tokens: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """Return our logits, the scale of the weights, and how far rounding alone moves them."""
    for scale in SCALES:
        ours = our_logits(read, model, tokens, scale=scale)
        rounding = deviation(ours, our_logits(read, model, tokens, scale=scale, dtype=torch.float64))
        if rounding <= 0.7 * TOLERANCE:  # the two models round each in its own order: together at most 1.4 times that
            break
    return ours, scale, rounding


def import_transformers() -> Any:
    """The package. Raises EnvironmentFault where it is missing or broken."""
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentFault(
            f"the export is checked against transformers, which cannot be imported ({error}); pip install "
            "transformers, or --skip-check (the model card then notes it)"
        ) from None
    return transformers


def our_logits(
    read: StateReader, model: ModelConfig, tokens: torch.Tensor, *, scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [batch, seq, vocab] of our model in plain torch, one layer in memory at a time."""
    ctx = ParallelContext.single()
    stream = DropoutStream(0, ctx.device)
    stream.enabled = False
    build = BuildContext(
        model=model, layout=LayoutConfig(vocab_padding_multiple=1), ctx=ctx, providers=torch_providers(),
        step=StepSlot(stream), dtype=dtype,
    )

    spec, norms = model_spec(model), norm_weights(model)

    def filled(unit: nn.Module) -> nn.Module:
        for parameter in unit.parameters():
            record = record_of(parameter)
            read_local(read, record, "weight", parameter)
            if record.name not in norms:
                parameter.data.mul_(scale)
        for record, buffer in recorded_buffers(unit):
            if not record.name.endswith(LAST_STEP):
                read_local(read, record, BUFFER, buffer)
        return unit.eval()

    with torch.no_grad():
        x = filled(Embedding(spec.embedding, build))(tokens)
        for index, layer in enumerate(spec.layers):
            x = filled(TransformerLayer(index, layer, build))(x)
        out: torch.Tensor = filled(Head(spec.head, build))(x)
    return out.transpose(0, 1)[..., : model.vocab_size]


# A pickle read as data: no class or function that it names is looked up, imported or called.
#
# Wherever a pickle would make an object, an :class:`Inert` stands, with the name
# and the arguments. Enough for torch.distributed.checkpoint's ``.metadata``, whose
# facts are strings, integers, tuples and dicts.

MAX_BYTES = 1 << 31
_MAX_VALUES = 1 << 28
_MAX_KEY = 1000


@dataclass(eq=False)
class Inert:
    """An object or a global of a pickle that was not made."""

    name: str
    """``module.Class`` of what would have been called; of a bare global: itself."""
    args: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    """Attributes that would have been set."""


_MARK = object()
_CONSTANT = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERAL = {
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "SHORT_BINSTRING", "BINSTRING", "UNICODE", "INT", "FLOAT", "LONG",
}
_IGNORED = {"PROTO", "FRAME"}


class _Machine:
    """The stack machine of the format, with objects left out."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.actions: dict[str, Callable[[Any], object]] = {
            "MEMOIZE": lambda _: self.memo.__setitem__(len(self.memo), self.stack[-1]),
            "BINPUT": self._put, "LONG_BINPUT": self._put, "PUT": self._put,
            "BINGET": self._get, "LONG_BINGET": self._get, "GET": self._get,
            "MARK": lambda _: self.stack.append(_MARK),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_SET": lambda _: self.stack.append([]),
            "TUPLE": lambda _: self.stack.append(tuple(self._marked())),
            "TUPLE1": lambda _: self.stack.append(tuple(self._take(1))),
            "TUPLE2": lambda _: self.stack.append(tuple(self._take(2))),
            "TUPLE3": lambda _: self.stack.append(tuple(self._take(3))),
            "APPEND": lambda _: self._append(self._take(1)), "APPENDS": lambda _: self._append(self._marked()),
            "ADDITEMS": lambda _: self._append(self._marked()),
            "SETITEM": lambda _: self._set(self._take(2)), "SETITEMS": lambda _: self._set(self._marked()),
            "GLOBAL": lambda a: self.stack.append(Inert(".".join(str(a).split(" ", 1)))),
            "STACK_GLOBAL": lambda _: self.stack.append(Inert(".".join(self._take(2)))),
            "NEWOBJ": lambda _: self._make(*self._take(2)), "REDUCE": lambda _: self._make(*self._take(2)),
            "NEWOBJ_EX": lambda _: self._make(*self._take(3)),
            "BUILD": lambda _: self._build(),
            "POP": lambda _: self._take(1),
        }

    def _put(self, index: Any) -> None:
        self.memo[int(index)] = self.stack[-1]

    def _get(self, index: Any) -> None:
        self.stack.append(self.memo[int(index)])

    def _take(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _marked(self) -> list[Any]:
        taken = []
        while (value := self.stack.pop()) is not _MARK:
            taken.append(value)
        return taken[::-1]

    def _append(self, values: list[Any]) -> None:
        self.stack[-1].extend(values)

    def _set(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items are set on something that is no dict")
        for key, value in zip(values[::2], values[1::2]):
            target[_frozen(key, [_MAX_KEY])] = value

    def _make(self, made: Any, args: Any, _: Any = None) -> None:
        self.stack.append(Inert(_name(made), tuple(args)))

    def _build(self) -> None:
        (state,) = self._take(1)
        target = self.stack[-1]
        if isinstance(target, Inert):
            if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
                state = {**(state[0] or {}), **state[1]}
            if isinstance(state, dict):
                target.state |= {str(k): v for k, v in state.items()}


def _name(made: Any) -> str:
    """Return the name of the call. Not ``repr``: that of a list in which all levels are shared has no end."""
    return made.name if isinstance(made, Inert) else type(made).__name__


def _frozen(key: Any, left: list[int]) -> Any:
    """A dict's key; objects are compared by identity. ``left``: how many values it may have."""
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"a key of more than {_MAX_KEY} values")
    return tuple([_frozen(part, left) for part in key]) if isinstance(key, (list, tuple)) else key


def read_inert(data: bytes, where: str) -> Any:
    """The value of a pickle, objects replaced by :class:`Inert`.

    Raises:
        CheckpointError: it is damaged, or uses opcodes that no checkpoint's metadata needs.
    """
    machine = _Machine()
    try:
        check_size(data, values=_MAX_VALUES)
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in machine.actions:
                machine.actions[name](argument)
            elif name in _LITERAL:
                machine.stack.append(argument)
            elif name in _CONSTANT:
                machine.stack.append(_CONSTANT[name])
            elif name == "STOP":
                return machine.stack.pop()
            elif name not in _IGNORED:
                raise ValueError(f"opcode {name}")
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: damaged, or no metadata: {type(error).__name__}: {error}") from None
    raise CheckpointError(f"{where}: damaged: it ends too early")
