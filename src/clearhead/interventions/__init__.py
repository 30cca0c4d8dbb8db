"""Interventions on a forward pass: attention patching, value zeroing, evaluation of the last row only."""

from clearhead.interventions.attention_patch import AttentionPatch, find_visible_keys, run_patched_forward
from clearhead.interventions.last_row import LastRowRunner
from clearhead.interventions.value_zeroing import value_zeroing_distances

__all__ = ["AttentionPatch", "LastRowRunner", "find_visible_keys", "run_patched_forward", "value_zeroing_distances"]
