"""captum's own defaults: the profile `captum`."""

from clearhead.profiles.base import Profile, Settings, register_profile

register_profile(
    Profile(
        name="captum",
        source="captum 0.9 (github.com/pytorch/captum), its defaults",
        differs="Saliency sums absolute values. Of integrated gradients the points of Riemann sums are rounded to "
        "float32, and its trapezoids are n where there are n − 1, so that the scores are too small by 1/n. Layer "
        "conductance takes the gradient at the start of each stretch, and its points leave the ends of the way out, so "
        "that the scores do not add up. DeepLIFT has rules for a few activation modules alone, so that its scores do "
        "not add up on transformers.",
        methods={
            "saliency": Settings({"reduce": "abs"}),
            "input-x-gradient": Settings(),
            "integrated-gradients": Settings({"captum": True}),
            "layer-conductance": Settings({"captum": True, "rule": "gauss-legendre"}),
            "deeplift": Settings({"captum": True}),
            "deeplift-shap": Settings({"captum": True}),
        },
    )
)
