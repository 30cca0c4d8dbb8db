"""Profiles: what an author's released code computes, quirks included, beside the corrected default.

A profile is a table from method to settings. Asked for a method that it does not name, it refuses; arguments given
beside it win. What an author drops or zeroes stays a unit, with the author's value (NaN for dropped).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.errors import InputError, unknown
from clearhead.methods.base import Method
from clearhead.units import Units

#: The scores of one stream's units, the units, and the rows that were read (with their weights) → the author's scores.
Finish = Callable[[Float[np.ndarray, "*row unit"], Units, Mapping[int, float]], Float[np.ndarray, "*row unit"]]


@dataclass(frozen=True)
class Settings:
    """One method as an author computes it: options of the method, the scale of the target, and what is done last."""

    options: Mapping[str, Any] = field(default_factory=dict)
    scale: str | None = None
    finish: Finish | None = None


@dataclass(frozen=True)
class Profile:
    """An author's settings. `differs` says what differs from the defaults, and why."""

    name: str
    source: str
    differs: str
    methods: Mapping[str, Settings]
    #: Whether padding in given model inputs stays, since the author's code does not cut it off.
    padding: bool = False

    def settings(self, method: str) -> Settings:
        if method not in self.methods:
            named = ", ".join(sorted(self.methods))
            raise InputError(f"the profile {self.name} says nothing about {method}: it has settings for {named}")
        return self.methods[method]

    def applied(self, method: Method) -> Method:
        """The method with the author's options, where it was not given others."""
        return method.defaults(**self.settings(method.name).options)


PROFILES: dict[str, Profile] = {}


def register_profile(profile: Profile) -> Profile:
    """Add a profile, from inside or outside the package."""
    PROFILES[profile.name] = profile
    return profile


def profile_named(name: str | None) -> Profile | None:
    if name is None:
        return None
    if name not in PROFILES:
        raise unknown("profile", name, sorted(PROFILES))
    return PROFILES[name]


def own_entry_zero(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The unit whose row is read gets nothing."""
    changed = scores.copy()
    changed[..., list(rows)] = 0
    return changed


def mm_clip_scores(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """Special tokens are dropped; what is left of a text is divided by its sum."""
    changed = np.where(units.special, np.nan, scores)
    if units.boxes is None:
        for row in rows:  # the end of the text: what follows is dropped, and so is the start
            changed[..., [0, *range(row, len(units))]] = np.nan
        with np.errstate(invalid="ignore"):
            changed /= np.nansum(changed, axis=-1, keepdims=True)
    return changed


def patches_alone(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """Special tokens are cut off."""
    return np.where(units.special, np.nan, scores)


def with_identity(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The identity, which Generic Attention starts from, stays in the scores; special tokens are cut off."""
    changed = patches_alone(scores, units, rows)
    for row, weight in rows.items():
        changed[..., row] += weight
    return changed


def rows_added(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The rows of class token and mean are added, where ours are averaged; special tokens are cut off."""
    return patches_alone(scores, units, rows) / rows.get(0, 1.0)


def own_entry_least(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The unit whose row is read gets the least score of all."""
    changed = scores.copy()
    changed[..., list(rows)] = scores.min(-1, keepdims=True)
    return changed


def own_entry_least_scaled(scores: np.ndarray, units: Units, rows: Mapping[int, float]) -> np.ndarray:
    """The same, and all scores brought to 0…1."""
    changed = own_entry_least(scores, units, rows)
    low, high = changed.min(-1, keepdims=True), changed.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (changed - low) / (high - low)


_TE = "Transformer-Explainability (Chefer, Gur & Wolf, CVPR 2021), github.com/hila-chefer, commit c3e578f"

register_profile(
    Profile(
        name="te_vit_eval",
        source=_TE,
        differs="The first layer is left out of Transformer Attribution and of rollout, as in the scripts that gave the "
        "published figures; the class token is cut off.",
        methods={
            "transformer-attribution": Settings({"layers": (1, None)}, finish=patches_alone),
            "rollout": Settings({"layers": (1, None)}, finish=patches_alone),
            "partial-lrp": Settings(finish=patches_alone),
            "lrp": Settings(finish=patches_alone),
            "attention": Settings(finish=patches_alone),
        },
    )
)

register_profile(
    Profile(
        name="te_vit_notebook",
        source=_TE,
        differs="All layers, as is our default; the class token is cut off.",
        methods={"transformer-attribution": Settings(finish=patches_alone)},
    )
)

_TE_BERT = (
    "Rows of Transformer Attribution are divided by their sums, and [CLS] gets the least score of all{scaled}; a mask is "
    "added to attention also where nothing is masked, and takes its 1e-9 of the relevance; padding is part of the maps"
)

register_profile(
    Profile(
        name="te_bert_eraser",
        source=_TE,
        differs="Transformer Attribution of the last layer alone. "
        + _TE_BERT.format(scaled="")
        + "; full LRP is read where relevance leaves the first layer, so that positions take no share; elsewhere the "
        "score of [CLS] is set to zero; GradCAM's whole map is brought to 0…1 before its row is read.",
        methods={
            "transformer-attribution": Settings(
                {"layers": (-1, None), "normalise": True, "mask": True}, finish=own_entry_least
            ),
            "partial-lrp": Settings({"mask": True}, finish=own_entry_zero),
            "lrp": Settings({"positions": False, "mask": True}, finish=own_entry_zero),
            "attention": Settings(finish=own_entry_zero),
            "rollout": Settings(finish=own_entry_zero),
            "attention-gradcam": Settings({"scaled": True}, finish=own_entry_zero),
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="te_bert_notebook",
        source=_TE,
        differs="All layers (two of its cells: the last alone, layers=(-1, None)). "
        + _TE_BERT.format(scaled=", all being brought to 0…1")
        + ".",
        methods={
            "transformer-attribution": Settings({"normalise": True, "mask": True}, finish=own_entry_least_scaled)
        },
        padding=True,
    )
)

_MM = "Transformer-MM-Explainability (Chefer, Gur & Wolf, ICCV 2021), github.com/hila-chefer, commit 58eaea8"

register_profile(
    Profile(
        name="mm_lxmert",
        source=_MM,
        differs="A row of relevance that is zero becomes NaN when it is divided by its sum, and stays so; the score of "
        "the token that is read is set to zero.",
        methods={
            "generic": Settings({"guard": "none"}, finish=own_entry_zero),
            "attention": Settings(finish=own_entry_zero),
            "rollout": Settings(finish=own_entry_zero),
            "attention-gradcam": Settings(finish=own_entry_zero),
        },
    )
)

register_profile(
    Profile(
        name="mm_visualbert",
        source=_MM,
        differs="Rollout is not halved layer by layer; GradCAM's whole map is brought to 0…1 before its row is read "
        "(NaN where the clamp leaves nothing of it); padding is part of the maps; the score of the token that is read "
        "is set to zero.",
        methods={
            "generic": Settings(finish=own_entry_zero),
            "attention": Settings(finish=own_entry_zero),
            "rollout": Settings({"half": False}, finish=own_entry_zero),
            "attention-gradcam": Settings({"scaled": True}, finish=own_entry_zero),
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="mm_detr",
        source=_MM,
        differs="A row of relevance that is zero becomes NaN when it is divided by its sum, and what is then NaN of a "
        "layer's addition (all of it, as a rule) is left out.",
        methods={
            "generic": Settings({"guard": "additions"}),
            "attention": Settings(),
            "rollout": Settings(),
            "attention-gradcam": Settings(),
        },
    )
)

register_profile(
    Profile(
        name="mm_clip",
        source=_MM,
        differs="The last layer of each tower alone; the logit with its scale instead of the cosine; special tokens "
        "are dropped, and the scores of a text are divided by their sum.",
        methods={"generic": Settings({"layers": (-1, None)}, scale="logit", finish=mm_clip_scores)},
    )
)

_BI = "transformerinterp (Beyond Intuition; Chen et al., TMLR 2023), github.com/jiaminchen-1031, commit a76854a"
#: Blocks are counted from 0 here; the authors' start_layer=s means block s − 1 and those after it.
_BI_LAYERS = "The layers are those of their scripts for ViT-B where layers= is not given (H: 3 on, C: 6 on, of 12). "

register_profile(
    Profile(
        name="bi_vit_h",
        source=_BI,
        differs=_BI_LAYERS + "The class token is cut off.",
        methods={"beyond-intuition-head": Settings({"steps": 20}, finish=patches_alone)},
    )
)

register_profile(
    Profile(
        name="bi_vit_c",
        source=_BI,
        differs=_BI_LAYERS + "The class token is cut off.",
        methods={"beyond-intuition-token": Settings({"steps": 20}, finish=patches_alone)},
    )
)

register_profile(
    Profile(
        name="bi_vit_mae",
        source=_BI,
        differs=_BI_LAYERS + "For models that average their patches: the mean of the patches' rows; the class token is "
        "cut off. In Generic Attention heads are averaged before the clamp, and the identity stays in the scores.",
        methods={
            "beyond-intuition-head": Settings({"steps": 20}, finish=patches_alone),
            "beyond-intuition-token": Settings({"steps": 20}, finish=patches_alone),
            "generic": Settings({"fusion": "mean, clamp"}, finish=with_identity),
            "rollout": Settings(finish=patches_alone),
        },
    )
)

register_profile(
    Profile(
        name="bi_vit_dino",
        source=_BI,
        differs=_BI_LAYERS + "For models that read the class token beside the mean of the patches: the two rows are "
        "added, which is twice our mean of them; the class token is cut off.",
        methods={
            "beyond-intuition-head": Settings({"steps": 20}, finish=rows_added),
            "beyond-intuition-token": Settings({"steps": 20}, finish=rows_added),
        },
    )
)

register_profile(
    Profile(
        name="bi_ga",
        source=_BI,
        differs="Generic Attention as their code for ViT has it: heads are averaged before the clamp, which is another "
        "explanation; all layers (their perturbation script leaves out the first: layers=(1, None)); the class token "
        "is cut off.",
        methods={"generic": Settings({"fusion": "mean, clamp"}, finish=patches_alone)},
    )
)

register_profile(
    Profile(
        name="bi_bert_h",
        source=_BI,
        differs="The last layer alone; padding is part of the maps; the score of [CLS] is set to zero.",
        methods={
            "beyond-intuition-head": Settings({"steps": 20, "layers": (-1, None)}, finish=own_entry_zero),
            "generic": Settings({"layers": (-1, None)}, finish=own_entry_zero),
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="bi_bert_c",
        source=_BI,
        differs="The last four layers; padding is part of the maps; the score of [CLS] is set to zero.",
        methods={
            "beyond-intuition-token": Settings({"steps": 20, "layers": (-4, None)}, finish=own_entry_zero),
            "generic": Settings({"layers": (-1, None)}, finish=own_entry_zero),
        },
        padding=True,
    )
)

register_profile(
    Profile(
        name="tam",
        source="Transition Attention Maps (Yuan et al., NeurIPS 2021 workshop), github.com/XianrenYty",
        differs="The layers are those of their scripts for ViT-B (4 on, of 12) where layers= is not given; the class "
        "token is cut off.",
        methods={"tam": Settings({"steps": 20}, finish=patches_alone)},
    )
)

register_profile(
    Profile(
        name="captum",
        source="captum 0.9 (github.com/pytorch/captum), its defaults",
        differs="Saliency sums absolute values. Of integrated gradients the points of Riemann sums are rounded to "
        "float32, and its trapezoids are n where there are n − 1, so that the scores are too small by 1/n.",
        methods={
            "saliency": Settings({"reduce": "abs"}),
            "input-x-gradient": Settings(),
            "integrated-gradients": Settings({"captum": True}),
        },
    )
)
