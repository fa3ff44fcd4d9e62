// What memory a kernel's arguments say that it touches.
#pragma once
#include <string>

// By the kernel's mangled name: a pointer to const is read, another one written, and of std::array<char*, N> (torch's
// element-wise kernels) the first is written and the rest read. Pointers inside of other structures are not found.
std::string kernel_memory(const std::string& mangled, void** arguments);
