"""Protocol presets: settings of published evaluations by name, including implementation details that change results.

te: Transformer-Explainability, bi: Beyond Intuition, idl: InterpretDL; lxmert and visualbert: Generic Attention.

One deviation is not copied: VisualBERT's loop ends after num_samples + 1 questions and divides their sum by
num_samples, so that its mean is too large by the factor 1 + 1/num_samples (1.0001 for 10,000 questions). Ours is the
mean over the evaluated questions.
"""

from clearhead.bench.protocols.base import BenchmarkProtocol
from clearhead.bench.protocols.perturbation_modalities import ImagePerturbation, RegionPerturbation, TextPerturbation
from clearhead.bench.protocols.segmentation import ObjectSegmentation
from clearhead.bench.protocols.sensitivity import SlidingSquareSensitivity

#: Fractions removed from questions and from LXMERT's regions, and from VisualBERT's larger number of regions.
_VQA_FRACTIONS = (0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
_VISUALBERT_REGION_FRACTIONS = (0.5, 0.75, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
_FRACTIONS_BELOW_ONE = tuple(tenth / 10 for tenth in range(1, 10))

PROTOCOL_PRESETS: dict[str, BenchmarkProtocol] = {
    "te-images": ImagePerturbation(judged="gold", fractions=_FRACTIONS_BELOW_ONE, fills=("black",), ranked="pixel"),
    "bi-images": ImagePerturbation(judged="gold", fractions=_FRACTIONS_BELOW_ONE, fills=("black",), ranked="pixel"),
    "idl-images": ImagePerturbation(
        fractions=tuple(step / 20 for step in range(1, 21)), fills=("grey",), ranked="pixel"
    ),
    "idl-text": TextPerturbation(fractions=(), fills=("pad",), protect=(1, 1)),
    "idl-infidelity": SlidingSquareSensitivity(sides=(32, 64, 128), stride=8, fill="grey"),
    "idl-pointing": ObjectSegmentation(thresholds=("raw-quarter",)),
    "bi-clip": ImagePerturbation(judged="gold", fills=("centre",), ranked="pixel"),
    "bi-movies": TextPerturbation(
        explained="gold",
        judged="gold",
        fractions=tuple(round(0.52 + 0.02 * step, 2) for step in range(9)),
        fills=("pad+attention",),
        protect=False,
        of="units",
        clamp=True,
    ),
    "bi-newsgroups": TextPerturbation(
        explained="gold",
        judged="gold",
        fills=("pad+attention",),
        protect=False,
        of="units",
        clamp=True,
        padded_to=512,
    ),
    "attcat": TextPerturbation(
        judged="gold",
        fractions=tuple(step / 9 for step in range(1, 10)),
        rounding="nearest",
        directions=("positive",),
        fills=("delete", "pad"),
        of="units",
        shortest=10,
    ),
    "eraser": TextPerturbation(
        fractions=(0.01, 0.05, 0.1, 0.2, 0.5), rounding="up", directions=("positive", "keep"), fills=("delete",)
    ),
    "lxmert-text": TextPerturbation(
        judged="gold", fractions=_VQA_FRACTIONS, rounding="kept", fills=("delete",), stream="text"
    ),
    "lxmert-regions": RegionPerturbation(judged="gold", fractions=_VQA_FRACTIONS),
    # the question mark is VisualBERT's read-out position: it is kept, like the separator that follows it
    "visualbert-text": TextPerturbation(
        judged="gold", fractions=_VQA_FRACTIONS, rounding="kept", fills=("delete",), stream="text", protect=(1, 2)
    ),
    "visualbert-regions": RegionPerturbation(judged="gold", fractions=_VISUALBERT_REGION_FRACTIONS),
}
