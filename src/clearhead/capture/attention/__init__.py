"""Attention calls during capture: materialised or tiled maps, their reductions, lazy masks."""
