"""The ghost machine's cublasLt compiled by itself, on the host's memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

GHOST = Path(__file__).resolve().parents[1] / "ghost"
CUDA_HEADER = """#pragma once
struct dim3 { unsigned x, y, z; };
typedef int cudaError_t;
"""
REST = """#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include "events.h"
#include "graphs.h"
#include "compute.h"
GhostMemory& GhostMemory::add(char, const void*, size_t) { return *this; }
void ghost_touch(const char*, const void*, const std::string&, const char*, ...) {}
void ghost_event(const char*, const void*, const char*, ...) {}
void* ghost_handle() { return malloc(1); }
bool ghost_computes() { return true; }
void ghost_stop(const char* format, ...) {
  va_list rest; va_start(rest, format); vfprintf(stderr, format, rest); va_end(rest); abort();
}
void ghost_do(const void*, std::function<void()> action) { action(); }
"""
"""What the ghost machine's cublasLt needs of the rest of it."""


def compiled_cublaslt(folder: Path) -> Path:
    """Compile it in a folder; return the library."""
    (folder / "cuda_runtime_api.h").write_text(CUDA_HEADER)
    (folder / "rest.cpp").write_text(REST)
    sources = [str(GHOST / "cublaslt.cpp"), str(GHOST / "products.cpp"), str(folder / "rest.cpp")]
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-std=c++17", f"-I{folder}", f"-I{GHOST}", *sources, "-o",
                    str(folder / "lib.so")], check=True)
    return folder / "lib.so"
