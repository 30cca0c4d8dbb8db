"""Write one short executed notebook for each kind of model to this folder.

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
    """The first cell: imports, and no progress bars, since the models are small and local."""
    imports = [*others, "import transformers", "", "import clearhead", *ours]
    return "\n".join([*imports, "", "transformers.logging.disable_progress_bar()", *lines])


#: By name: a title with an introduction, and cells. A cell that begins with "#" and a space is Markdown.
NOTEBOOKS: dict[str, tuple[str, ...]] = {
    "text": (
        "# A text classifier\n\nWhich words caused the prediction? `zoo:sentiment` classifies a sentence.",
        begin('ex = clearhead.load("zoo:sentiment")', 'e = ex.explain("You look extremely confused")', "e"),
        "# The same for a paper: LaTeX with colours, and a matplotlib figure whose axes you can change.",
        "print(e.words().latex())",
        'e.words().plot("bars")  # .figure.savefig("why.pdf") keeps it as a vector file',
        "# How well do methods agree on this input? Kendall's tau-b of each pair.",
        'found = clearhead.compare(ex, "You look extremely confused", ["generic", "grad-sam", "attcat"])\n'
        "found.agreement.round(2)",
    ),
    "vit": (
        "# A vision transformer\n\nWhich patches caused the prediction of `zoo:pets`? Drag the slider to see the mask.",
        begin(
            'ex = clearhead.load("zoo:pets")',
            "e = ex.explain(skimage.data.chelsea())",
            "e",
            others=("import skimage.data",),
        ),
        "# The patches with the highest scores by row and column, and the number of pixels in the mask.",
        "e.top(3), int(e.mask().sum())",
    ),
    "clip": (
        "# A dual encoder: an image and a caption\n\nWhich patches and which words make them similar?",
        begin(
            'ex = clearhead.load("zoo:pets-clip")',
            'e = ex.explain(text="a photo of a cat", image=skimage.data.chelsea())',
            "e",
            others=("import skimage.data",),
        ),
        '# Each stream has its own explanation: `e["text"]` and `e["image"]`.',
        'e["text"].words().top(3), e["image"].heat_map().shape',
    ),
    "joint": (
        "# A question about an image\n\nOne model processes words and regions jointly; both have scores.",
        begin(
            'ex = clearhead.load("zoo:shapes-vqa")',
            'given = examples.make_example_input("shapes-vqa", 3)',
            "e = ex.explain(**given)",
            "e",
            ours=("from clearhead_zoo import examples",),
        ),
        "# The words and the regions with the highest scores.",
        'given["text"], e.prediction["label"], e["text"].top(2), e["regions"].top(2)',
    ),
    "detector": (
        "# A detector\n\nEvery detected object with its own map. Select one to show it alone.",
        begin(
            'ex = clearhead.load("zoo:shapes-detr")',
            'e = ex.explain(examples.make_example_input("shapes-detr", 3)["image"])',
            "e",
            ours=("from clearhead_zoo import examples",),
        ),
        "# Each object is a step; `step` selects one.",
        'e.steps, e["image"].step(0).top(2)',
    ),
    "encoder-decoder": (
        "# An encoder–decoder\n\nFrom spelling to phonemes: which letters caused each phoneme?",
        begin('ex = clearhead.load("zoo:spell")', 'e = ex.explain("phone")', "e"),
        "# Steps × units as a figure.",
        'e["source"].plot("matrix")',
    ),
    "decoder": (
        "# A decoder\n\nWhich tokens of the prompt caused the next token? `zoo:recall` looks up the value of a key.",
        begin('ex = clearhead.load("zoo:recall")', 'e = ex.explain("k7 v2 k3 v9 k3 →")', "e"),
        "# The tokens with the highest scores, and a figure of the certificate.",
        'e.top(3), e.certificate["capture_error"]',
    ),
}


def notebook(name: str) -> nbformat.NotebookNode:
    """The notebook before execution."""
    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for number, source in enumerate(NOTEBOOKS[name]):
        is_text = source.startswith("# ")
        text = source if number == 0 else source.removeprefix("# ")
        cell = nbformat.v4.new_markdown_cell(text) if is_text else nbformat.v4.new_code_cell(source)
        cell["id"] = f"{name}-{number}"
        made.cells.append(cell)
    return made


def executed(name: str) -> nbformat.NotebookNode:
    """The notebook with the outputs of its cells, without standard error."""
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
