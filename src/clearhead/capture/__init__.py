"""Capture: run a model once and record its attention calls, layer inputs and gradients."""
