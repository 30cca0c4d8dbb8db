"""Modified backward passes: the ordinary forward pass, differentiated by other rules than calculus (LRP, GIM …).

`mode.py` intercepts every operation of a forward pass and gives it the rule of its kind. The rule sets are `lrp.py` and
the variants of `modified_gradient.py`: `attn_lrp.py`, `pa_lrp.py`, `cp_lrp.py`, `libragrad.py` and `gim.py`.
`paired_pass.py` and `deeplift.py` do the same for DeepLIFT, which compares two forward passes. The model is not
patched, and no hook stays on it.
"""
