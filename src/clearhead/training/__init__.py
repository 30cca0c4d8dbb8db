"""The few training loops that zoo scripts, probes and attention guidance share.

Needs torch, numpy and safetensors, nothing else: the scripts also run on machines that have little more than that.
"""

from clearhead.training.checkpoint import load_checkpoint, save_checkpoint
from clearhead.training.ema import Average
from clearhead.training.loop import Clock, depth_groups, ramp, train
from clearhead.training.muon import Muon

__all__ = ["Average", "Clock", "Muon", "depth_groups", "load_checkpoint", "ramp", "save_checkpoint", "train"]
