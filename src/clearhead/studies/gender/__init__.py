"""Bias along an axis such as gender, layer by layer, in a masked language model."""
