"""The settings under which authors published, by name, with the quirks of their code that decide figures.

te: Transformer-Explainability, bi: Beyond Intuition, idl: InterpretDL; lxmert and visualbert: Generic Attention.

One quirk is not copied: VisualBERT's loop ends after num_samples + 1 questions and divides their sum by num_samples, so
that its mean is too large by the factor 1 + 1/num_samples (1.0001 for 10,000 questions). Ours is the mean of the
questions that there are.
"""

from clearhead.bench.protocols.base import Protocol
from clearhead.bench.protocols.perturbation_modalities import Pictures, Regions, Texts
from clearhead.bench.protocols.segmentation import Segmentation
from clearhead.bench.protocols.sensitivity import Squares

#: Fractions removed from questions and from regions of LXMERT, and from the more regions of VisualBERT.
_VQA = (0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
_MANY_BOXES = (0.5, 0.75, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
_NINE = tuple(tenth / 10 for tenth in range(1, 10))

PUBLISHED: dict[str, Protocol] = {
    "te-images": Pictures(judged="gold", fractions=_NINE, fills=("black",), ranked="pixel"),
    "bi-images": Pictures(judged="gold", fractions=_NINE, fills=("black",), ranked="pixel"),
    "idl-images": Pictures(fractions=tuple(step / 20 for step in range(1, 21)), fills=("grey",), ranked="pixel"),
    "idl-text": Texts(fractions=(), fills=("pad",), protect=(1, 1)),
    "idl-infidelity": Squares(sides=(32, 64, 128), stride=8, fill="grey"),
    "idl-pointing": Segmentation(thresholds=("raw-quarter",)),
    "bi-clip": Pictures(judged="gold", fills=("centre",), ranked="pixel"),
    "bi-movies": Texts(
        explained="gold",
        judged="gold",
        fractions=tuple(round(0.52 + 0.02 * step, 2) for step in range(9)),
        fills=("pad+attention",),
        protect=False,
        of="units",
        clamp=True,
    ),
    "bi-newsgroups": Texts(
        explained="gold",
        judged="gold",
        fills=("pad+attention",),
        protect=False,
        of="units",
        clamp=True,
        padded_to=512,
    ),
    "attcat": Texts(
        judged="gold",
        fractions=tuple(step / 9 for step in range(1, 10)),
        rounding="nearest",
        directions=("positive",),
        fills=("delete", "pad"),
        of="units",
        shortest=10,
    ),
    "eraser": Texts(
        fractions=(0.01, 0.05, 0.1, 0.2, 0.5), rounding="up", directions=("positive", "keep"), fills=("delete",)
    ),
    "lxmert-text": Texts(judged="gold", fractions=_VQA, rounding="kept", fills=("delete",), stream="text"),
    "lxmert-regions": Regions(judged="gold", fractions=_VQA),
    # its question mark stands where the model reads the answer off: it stays, as the separator behind it
    "visualbert-text": Texts(
        judged="gold", fractions=_VQA, rounding="kept", fills=("delete",), stream="text", protect=(1, 2)
    ),
    "visualbert-regions": Regions(judged="gold", fractions=_MANY_BOXES),
}
