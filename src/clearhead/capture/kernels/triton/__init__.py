"""Triton kernels for tiled attention: reductions of attention maps and the backward pass."""
