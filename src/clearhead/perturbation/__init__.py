"""Perturbation: which units of an input can be masked or removed, and how a masked input is built."""
