"""Explain one sentence and one image, each with several methods: in the terminal, and on one page, demo.html.

    make demo            (or: python examples/demo.py [FILE.html])

Nothing is downloaded: the models come with clearhead-zoo, the cat with scikit-image.
"""

import sys
from pathlib import Path

import skimage.data
import transformers
from rich.console import Console

import clearhead

SENTENCE = "You look extremely confused"
TEXT_METHODS = ["ensemble", "generic", "grad-sam", "attcat", "input-x-gradient", "rollout"]
IMAGE_METHODS = ["ensemble", "generic", "grad-sam", "attention-gradcam", "rollout", "saliency"]


def main(path: Path) -> None:
    transformers.logging.disable_progress_bar()  # the models are small and local
    console = Console(highlight=False)

    console.rule(f"zoo:sentiment: “{SENTENCE}”")
    sentence = clearhead.compare(clearhead.load("zoo:sentiment"), SENTENCE, TEXT_METHODS)
    console.print(sentence)

    console.rule("zoo:pets: the cat image of scikit-image, chelsea")
    image = clearhead.compare(clearhead.load("zoo:pets"), skimage.data.chelsea(), IMAGE_METHODS)
    console.print(image)

    clearhead.write_report([sentence, image], path, title="clearhead: a sentence and an image, explained")
    console.rule()
    console.print(f"The same results as a page: {path.resolve()} (opens without a network)", soft_wrap=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo.html"))
    except clearhead.ClearheadError as problem:
        sys.exit(f"demo: {problem}")
