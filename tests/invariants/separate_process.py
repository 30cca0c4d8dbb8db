"""A program that explains every subject in a new process, and opens and saves again what another process saved."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.invariants.cases import Results

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")


def explain_new(subject: str, methods: "Iterable[str]", seed: int = 0) -> "Results":
    """Explain with every variant of these methods, one method at a time, with a new explainer."""
    from tests import models
    from tests.invariants import cases

    ex, raws = models.explainer(subject), models.inputs(subject)
    ex.explain(raws, method="position")  # the self-test runs on the same inputs as that of `cases.explainer`
    calls = [ex.explain(raws, **cases.explain_arguments(subject, [method]), seed=seed) for method in methods]
    return {variant: explanations for results in calls for variant, explanations in results.items()}


def save_all(folder: Path, methods: "Iterable[str]", explain: "Callable[..., Results]" = explain_new) -> None:
    """One file for each subject, variant of these methods, and input."""
    from tests.invariants import cases

    folder.mkdir(parents=True)
    for subject in cases.SUBJECTS:
        applicable = [method for method in methods if cases.applies(method, subject)]
        for index, (variant, explanations) in enumerate(explain(subject, applicable).items()):
            for i, e in enumerate(explanations):
                method = variant.split("(")[0]
                e.save(folder / f"{method}.{subject.replace('/', '-')}.{index:03}.{i}.safetensors")


def resave(folder: Path, destination: Path) -> None:
    from clearhead import load_explanation

    destination.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        load_explanation(path).save(destination / path.name)


if __name__ == "__main__":
    saved, folder, again = map(Path, sys.argv[1:4])
    save_all(folder, sys.argv[4:])
    resave(saved, again)
