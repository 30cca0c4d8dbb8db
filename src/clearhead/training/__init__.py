"""Training utilities shared by the zoo's scripts, the probes and attention guidance.

They depend only on torch, numpy and safetensors, so that training scripts run on minimal machines.
"""

from clearhead.training.checkpoint import load_checkpoint, save_checkpoint
from clearhead.training.ema import ExponentialMovingAverage
from clearhead.training.loop import TrainingBudget, build_layerwise_lr_groups, compute_warmup_decay, train
from clearhead.training.muon import Muon

__all__ = [
    "ExponentialMovingAverage",
    "Muon",
    "TrainingBudget",
    "build_layerwise_lr_groups",
    "compute_warmup_decay",
    "load_checkpoint",
    "save_checkpoint",
    "train",
]
