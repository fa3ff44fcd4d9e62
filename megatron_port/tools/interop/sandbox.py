"""Take away what a process that parses foreign files has no use for: network, other programs, memory without end.

Linux only, and best effort: what could not be taken away is reported.
"""

from __future__ import annotations

import ctypes
import platform
import resource
import struct

_DENIED = {
    # socket, connect, bind, sendto, sendmsg, execve, execveat, ptrace, process_vm_readv, process_vm_writev
    "x86_64": (0xC000003E, (41, 42, 49, 44, 46, 59, 322, 101, 310, 311)),
    "aarch64": (0xC00000B7, (198, 203, 200, 206, 211, 221, 281, 117, 270, 271)),
}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO_EPERM = 0x7FFF0000, 0x00050000 | 1


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def limit(*, memory: int, file_bytes: int, seconds: int) -> None:
    """Set resource limits: address space and file size in bytes, CPU time in seconds, no core dumps."""
    for what, value in (
        (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, file_bytes), (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def forbid_network_and_programs() -> str | None:
    """No new sockets, no other programs, no tracing, for the rest of the process's life (seccomp).

    Returns why the kernel did not do it, or None.
    """
    known = _DENIED.get(platform.machine())
    if platform.system() != "Linux" or known is None:
        return f"not known on {platform.system()} {platform.machine()}"
    architecture, denied = known
    lines = [(_LOAD_WORD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _ERRNO_EPERM)]
    lines.append((_LOAD_WORD, 0, 0, 0))
    lines += [(_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO_EPERM)]  # x86-64's second numbering
    for number in denied:
        lines += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO_EPERM)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = _Program(len(lines), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return f"prctl(PR_SET_NO_NEW_PRIVS) failed with errno {ctypes.get_errno()}"
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program), 0, 0) != 0:
        return f"prctl(PR_SET_SECCOMP) failed with errno {ctypes.get_errno()}"
    return None
