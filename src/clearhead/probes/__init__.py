"""Attention put to the test: does the answer hang on it, and does it agree with other evidence?"""

from clearhead.probes.adversarial_attention import adversary
from clearhead.probes.adversarial_training import frontier
from clearhead.probes.attention_view import AttentionView, view
from clearhead.probes.cross_attention_view import StreamsView, by_stream, links, look
from clearhead.probes.evidence_correlation import correlation
from clearhead.probes.guided_mlp import diagnostic
from clearhead.probes.head_importance import heads
from clearhead.probes.permuted_attention import permutation
from clearhead.probes.probe_result import ProbeResult
from clearhead.probes.residual_share import skips
from clearhead.probes.seed_variance import seeds
from clearhead.probes.uniform_attention import uniform

__all__ = [
    "AttentionView",
    "ProbeResult",
    "StreamsView",
    "adversary",
    "by_stream",
    "correlation",
    "diagnostic",
    "frontier",
    "heads",
    "links",
    "look",
    "permutation",
    "seeds",
    "skips",
    "uniform",
    "view",
]
