"""Passes under rules: the same forward pass, with operations differentiated by other rules than calculus has.

`mode.py` sees every operation of a pass and gives it the rule of its kind; `lrp.py` and `attn_lrp.py` are the
families of rules. Nothing about a model is patched, and nothing is left behind.
"""
