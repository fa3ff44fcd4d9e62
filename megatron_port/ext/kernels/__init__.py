"""Chosen once at start: the device, the collective library, one provider for each op; and the JIT guard."""
