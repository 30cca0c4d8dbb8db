"""Writes one short executed notebook for each kind of model into this folder.

python examples/notebooks/make.py            all of them
python examples/notebooks/make.py vit clip   some of them

Nothing is downloaded: the models come with clearhead-zoo, the cat with scikit-image.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def begin(*lines: str, others: tuple[str, ...] = (), ours: tuple[str, ...] = ()) -> str:
    """The first cell: imports, and no progress bars, since the models are small and here already."""
    imports = [*others, "import transformers", "", "import clearhead", *ours]
    return "\n".join([*imports, "", "transformers.logging.disable_progress_bar()", *lines])


#: By name: a title, what there is to see, and cells. A cell that begins with "#" and a space is text.
NOTEBOOKS: dict[str, tuple[str, ...]] = {
    "text": (
        "# A text classifier\n\nWhich words made it say so? `zoo:sentiment` reads a sentence.",
        begin('ex = clearhead.load("zoo:sentiment")', 'e = ex.explain("You look extremely confused")', "e"),
        "# The same for a paper: LaTeX with colours, and a figure whose axes you can change.",
        "print(e.words().latex())",
        'e.words().plot("bars")  # .figure.savefig("why.pdf") keeps it as a vector file',
        "# How far do methods agree on this input?",
        'found = clearhead.compare(ex, "You look extremely confused", ["generic", "grad-sam", "attcat"])\n'
        "found.agreement.round(2)",
    ),
    "vit": (
        "# A vision transformer\n\nWhich patches made `zoo:pets` say so? Drag the slider, or look at the mask.",
        begin(
            'ex = clearhead.load("zoo:pets")',
            "e = ex.explain(skimage.data.chelsea())",
            "e",
            others=("import skimage.data",),
        ),
        "# The strongest patches by row and column, and how many pixels stand out.",
        "e.top(3), int(e.mask().sum())",
    ),
    "clip": (
        "# Two encoders: a picture and a caption\n\nWhat in the picture and in the words makes them alike?",
        begin(
            'ex = clearhead.load("zoo:pets-clip")',
            'e = ex.explain(text="a photo of a cat", image=skimage.data.chelsea())',
            "e",
            others=("import skimage.data",),
        ),
        '# Each stream is an explanation of its own: `e["text"]` and `e["image"]`.',
        'e["text"].words().top(3), e["image"].heat_map().shape',
    ),
    "joint": (
        "# A question about a picture\n\nOne model reads words and regions together; both have scores.",
        begin(
            'ex = clearhead.load("zoo:shapes-vqa")',
            'given = examples.example("shapes-vqa", 3)',
            "e = ex.explain(**given)",
            "e",
            ours=("from clearhead_zoo import examples",),
        ),
        "# The words and the regions that matter most.",
        'given["text"], e.prediction["label"], e["text"].top(2), e["regions"].top(2)',
    ),
    "detector": (
        "# A detector\n\nEvery object that was found, each with its own map. Choose one to see it alone.",
        begin(
            'ex = clearhead.load("zoo:shapes-detr")',
            'e = ex.explain(examples.example("shapes-detr", 3)["image"])',
            "e",
            ours=("from clearhead_zoo import examples",),
        ),
        "# One object alone is a step.",
        'e.steps, e["image"].step(0).top(2)',
    ),
    "encoder-decoder": (
        "# An encoder and a decoder\n\nFrom spelling to sounds: which letters made each phoneme?",
        begin('ex = clearhead.load("zoo:spell")', 'e = ex.explain("phone")', "e"),
        "# Step × unit as a figure.",
        'e["source"].plot("matrix")',
    ),
    "decoder": (
        "# A decoder\n\nWhat in the prompt made it say the next word? `zoo:recall` finds the value of a key.",
        begin('ex = clearhead.load("zoo:recall")', 'e = ex.explain("k7 v2 k3 v9 k3 →")', "e"),
        "# The tokens that matter most, and what was checked about this result.",
        'e.top(3), e.certificate["capture_error"]',
    ),
}


def notebook(name: str) -> nbformat.NotebookNode:
    """The notebook as it is before it has run."""
    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for number, source in enumerate(NOTEBOOKS[name]):
        is_text = source.startswith("# ")
        text = source if number == 0 else source.removeprefix("# ")
        cell = nbformat.v4.new_markdown_cell(text) if is_text else nbformat.v4.new_code_cell(source)
        cell["id"] = f"{name}-{number}"
        made.cells.append(cell)
    return made


def executed(name: str) -> nbformat.NotebookNode:
    """The notebook with what its cells gave; what went to the error stream is left out."""
    made = notebook(name)
    NotebookClient(made, timeout=600, kernel_name="python3").execute()
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return made


def main(names: list[str]) -> None:
    for name in names or list(NOTEBOOKS):
        path = HERE / f"{name}.ipynb"
        nbformat.write(executed(name), path)
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    main(sys.argv[1:])
