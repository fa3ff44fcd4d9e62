"""Providers of ops, chosen once at start; own compiled kernels; fp8; captured steps; the guard against JIT."""
