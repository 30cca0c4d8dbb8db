"""Run as a program: explain every subject in a new process, and open and save again what another process saved."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.laws.cases import Results

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false")


def made_anew(subject: str, seed: int = 0) -> "Results":
    from tests import models
    from tests.laws import cases

    return models.explainer(subject).explain(models.inputs(subject), **cases.everything(subject), seed=seed)


def save_all(folder: Path, made: "Callable[[str], Results]" = made_anew) -> None:
    """One file for each subject, method and input."""
    from tests.laws import cases

    folder.mkdir(parents=True)
    for subject in cases.SUBJECTS:
        results = made(subject)
        for place, (variant, explanations) in enumerate(results.items()):
            for i, e in enumerate(explanations):
                e.save(folder / f"{subject.replace('/', '-')}.{place:03}.{variant.split('(')[0]}.{i}.safetensors")


def save_again(folder: Path, into: Path) -> None:
    from clearhead import open_explanation

    into.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        open_explanation(path).save(into / path.name)


if __name__ == "__main__":
    given, mine, again = map(Path, sys.argv[1:])
    save_all(mine)
    save_again(given, again)
