"""The ops of ``kernels/`` as differentiable functions. ``kernels.load`` must have run before one is called.

Each module has ``register()``, which gives torch the shapes (for torch.compile and opcheck) and gradients of its ops.
"""
