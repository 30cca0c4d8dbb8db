"""The profile `captum`: the defaults of captum."""

from clearhead.profiles.base import MethodSettings, Profile, register_profile

register_profile(
    Profile(
        name="captum",
        source="captum 0.9 (github.com/pytorch/captum), its defaults",
        differences="Saliency sums absolute values. Integrated gradients round the points of Riemann sums to float32, "
        "and divide trapezoids by n instead of n − 1, so that the scores are too small by 1/n. Layer conductance uses "
        "the gradient at the start of each interval, and its points leave out the ends of the path, so that the "
        "scores are not complete. DeepLIFT has rules for a few activation modules only, so that its scores are not "
        "complete on transformers.",
        methods={
            "saliency": MethodSettings({"reduce": "abs"}),
            "input-x-gradient": MethodSettings(),
            "integrated-gradients": MethodSettings({"captum": True}),
            "layer-conductance": MethodSettings({"captum": True, "rule": "gauss-legendre"}),
            "deeplift": MethodSettings({"captum": True}),
            "deeplift-shap": MethodSettings({"captum": True}),
        },
    )
)
