"""PA-LRP's rules: those of AttnLRP, in a pass in which position embeddings are leaves of the graph, too.

    x + P                ordinary gradient for both
    q ⊙ cos, q′ ⊙ sin    halved, for each factor: the product of two tensors of the graph

They are another set than AttnLRP's, because a pass with leaves for cosines and sines halves what queries and keys get.
"""

from dataclasses import dataclass

from clearhead.backward_rules.attn_lrp import AttnLRPRules


@dataclass(frozen=True)
class PALRPRules(AttnLRPRules):
    """AttnLRP's rules for a pass whose positions receive relevance."""

    name = "PA-LRP"
