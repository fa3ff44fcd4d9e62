"""The ops of ``kernels/`` as differentiable functions. ``kernels.load`` must have run before one is called.

Functions called ``register_…`` give torch the shapes (for torch.compile and opcheck) and gradients of a module's ops.
"""
