"""Attention kernels for tiled capture: CPU, fused SDPA and Triton, each validated before use."""
