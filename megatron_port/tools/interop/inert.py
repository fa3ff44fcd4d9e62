"""A pickle read as data: no class or function that it names is looked up, imported or called.

Wherever a pickle would make an object, an :class:`Inert` stands, with the name
and the arguments. Enough for torch.distributed.checkpoint's ``.metadata``, whose
facts are strings, integers, tuples and dicts.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_port.core.errors import CheckpointError
from megatron_port.tools.interop.unpickle import check_size

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
