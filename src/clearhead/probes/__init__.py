"""Attention put to the test: does the answer hang on it, and does it agree with other evidence?"""

from clearhead.probes.attacking import adversary
from clearhead.probes.correlating import correlation
from clearhead.probes.diagnosing import diagnostic
from clearhead.probes.flattening import uniform
from clearhead.probes.per_head import heads
from clearhead.probes.permuting import permutation
from clearhead.probes.results import ProbeResult
from clearhead.probes.seeding import seeds
from clearhead.probes.skipping import skips
from clearhead.probes.stream_views import StreamsView, by_stream, links, look
from clearhead.probes.trading import frontier
from clearhead.probes.viewing import AttentionView, view

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
