"""Concept directions in hidden states: find them, test whether they drive a class, and remove them from the model."""

from clearhead.concepts.directions import Direction, Directions

__all__ = ["Direction", "Directions"]
