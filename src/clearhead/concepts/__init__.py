"""Directions in hidden space: what lies along them, whether it drives a class, and the model without it."""

from clearhead.concepts.directions import Direction, Directions

__all__ = ["Direction", "Directions"]
