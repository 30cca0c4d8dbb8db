"""Interventions on a forward pass: attention patching, value zeroing, evaluation of the last row only."""
