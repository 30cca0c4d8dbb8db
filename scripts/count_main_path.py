"""Counts the classes and stack frames of clearhead between `explain` and the model.

Usage: count_main_path.py [REVISION ...], with PYTHON's clearhead for the work tree, and a checkout of each revision.

The call is the second `ex.explain("…", method="generic")` of a tiny BERT. A class counts if one of its own methods runs
during the call (inherited methods count for the class that defines them), or if it is a data class that is made.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TEXT = "the film is not good"


def make_explainer() -> Any:
    """Make an explainer of a tiny BERT with a tokenizer that knows the words of `TEXT`."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    import clearhead

    torch.manual_seed(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(TEXT.split()))]
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=len(vocabulary)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.txt"
        path.write_text("\n".join(vocabulary))
        tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)}, vocab_file=str(path))
    return clearhead.load((BertForSequenceClassification(config).eval(), tokenizer))


class MainPathProfile:
    """Counts, as a function for `sys.setprofile`, what runs inside the package.

    Attributes:
        classes: Names of the classes whose methods ran, and of the data classes that were made.
        functions: Names of the functions that ran.
        frames_to_model: The package's frames on the stack when the model was first called.
    """

    def __init__(self, package: Path) -> None:
        self.package = str(package)
        self.classes: set[str] = set()
        self.functions: set[str] = set()
        self.frames_to_model: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not self.frames_to_model and code.co_qualname == "BertForSequenceClassification.forward":
            self.frames_to_model = self._list_frames(frame)
        if code.co_filename == "<string>":
            self._add_dataclass(frame)
        elif code.co_filename.startswith(self.package) and "<lambda>" not in code.co_qualname:
            self._add_function(code)

    def _list_frames(self, frame: FrameType) -> list[str]:
        """List the package's functions on the stack, outermost first."""
        names = []
        current: FrameType | None = frame
        while current is not None:
            if current.f_code.co_filename.startswith(self.package):
                names.append(current.f_code.co_qualname)
            current = current.f_back
        return names[::-1]

    def _add_dataclass(self, frame: FrameType) -> None:
        """Add the class of a generated `__init__`, if it is one of the package."""
        instance = frame.f_locals.get("self")
        made = type(instance)
        if frame.f_code.co_name == "__init__" and dataclasses.is_dataclass(made) and "clearhead" in made.__module__:
            self.classes.add(made.__qualname__)

    def _add_function(self, code: CodeType) -> None:
        """Add a function, and its class if it is a method."""
        if code.co_name in ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"):
            return
        self.functions.add(f"{Path(code.co_filename).relative_to(self.package)}:{code.co_qualname}")
        owner = code.co_qualname.split(".<locals>")[0].rpartition(".")[0]
        if owner:
            self.classes.add(owner)


def count_main_path() -> dict[str, Any]:
    """Profile the second explanation."""
    import clearhead

    explainer = make_explainer()
    explainer.explain(TEXT, method="generic")
    profile = MainPathProfile(Path(clearhead.__file__).parent)
    sys.setprofile(profile)
    try:
        explainer.explain(TEXT, method="generic")
    finally:
        sys.setprofile(None)
    explain_frame = profile.frames_to_model.index("Explainer.explain")
    return {
        "classes": sorted(profile.classes),
        "functions": len(profile.functions),
        "modules": len({name.partition(":")[0] for name in profile.functions}),
        "frames": profile.frames_to_model[explain_frame:],
    }


def count_in_process(source: Path) -> dict[str, Any]:
    """Profile the package in a folder, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, __file__, "--json"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(finished.stderr[-2000:])
    counts: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revisions", nargs="*", help="commits to count, besides the work tree")
    parser.add_argument("--json", action="store_true", help="print the counts of the imported clearhead as JSON")
    chosen = parser.parse_args()
    if chosen.json:
        print(json.dumps(count_main_path()))
        return
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        sources = {"work tree": root / "src"}
        for revision in chosen.revisions:
            checkout = Path(folder) / revision
            checkout.mkdir()
            archive = subprocess.run(["git", "-C", root, "archive", revision, "src"], capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", checkout], input=archive.stdout, check=True)
            sources[revision] = checkout / "src"
        for name, source in sources.items():
            counts = count_in_process(source)
            print(
                f"{name}: {len(counts['classes'])} classes, {counts['functions']} functions in {counts['modules']} "
                f"modules, {len(counts['frames'])} frames from explain to the model"
            )
            print(f"  classes: {', '.join(counts['classes'])}")
            print(f"  frames: {' > '.join(counts['frames'])}")


if __name__ == "__main__":
    main()
