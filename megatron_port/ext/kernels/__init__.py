"""Providers of ops, chosen once at start; own compiled kernels; fp8; recorded steps; the guard against JIT."""
