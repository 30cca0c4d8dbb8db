"""Modified backward passes: the ordinary forward pass, differentiated by other rules than calculus (LRP, AttnLRP).

`mode.py` intercepts every operation of a forward pass and gives it the rule of its kind; `lrp.py` and `attn_lrp.py`
are the rule sets. `paired_pass.py` and `deeplift.py` do the same for DeepLIFT, which compares two forward passes. The
model is not patched, and no hook stays on it.
"""
