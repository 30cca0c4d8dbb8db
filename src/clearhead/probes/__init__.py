"""Probes: does the model's output depend on attention, and does attention agree with other evidence?"""

from clearhead.probes.adversarial_attention import run_adversary_probe
from clearhead.probes.adversarial_training import run_frontier_probe
from clearhead.probes.attention_view import AttentionView, compute_attention_view
from clearhead.probes.cross_attention_view import (
    MultiStreamAttentionView,
    compute_attention_links,
    compute_multi_stream_view,
    view_attention,
)
from clearhead.probes.evidence_correlation import run_correlation_probe
from clearhead.probes.guided_mlp import run_diagnostic_probe
from clearhead.probes.head_importance import run_heads_probe
from clearhead.probes.permuted_attention import run_permutation_probe
from clearhead.probes.probe_result import ProbeResult
from clearhead.probes.residual_share import run_skips_probe
from clearhead.probes.seed_variance import run_seeds_probe
from clearhead.probes.uniform_attention import run_uniform_probe

__all__ = [
    "AttentionView",
    "MultiStreamAttentionView",
    "ProbeResult",
    "compute_attention_links",
    "compute_attention_view",
    "compute_multi_stream_view",
    "run_adversary_probe",
    "run_correlation_probe",
    "run_diagnostic_probe",
    "run_frontier_probe",
    "run_heads_probe",
    "run_permutation_probe",
    "run_seeds_probe",
    "run_skips_probe",
    "run_uniform_probe",
    "view_attention",
]
