"""Attention while it is captured: materialised or tiled maps, their reductions, lazy masks."""
