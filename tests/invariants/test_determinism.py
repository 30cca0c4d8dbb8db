"""Laws 6 and 7: same seed, same bytes, in this process and in a new one; a file re-opens as what was saved."""

import os
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import clearhead
from tests import models
from tests.invariants import cases, separate_process

#: Methods that draw random numbers.
DRAWING = {"random", "kernel-shap", "lime", "smoothgrad", "gradient-shap", "deeplift-shap"}
DRAWING |= {"beyond-intuition-head", "beyond-intuition-token", "tam"}  # with feedback="smoothed"
ROOT = Path(__file__).parents[2]


EACH_METHOD = pytest.mark.parametrize("method", cases.METHODS)


def kept(subject, methods):
    """What the other laws explained, in a process that has explained much else."""
    return {variant: es for method in methods for variant, es in cases.batched(subject, method).items()}


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """Every explanation saved four times: twice here, once by a new process, once opened and saved again by it.

    Only of the methods that tests were selected for, all of them at once: a new process takes seconds to start.
    """
    tests = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    selected = {test.callspec.params.get("method") for test in tests}
    methods = [method for method in cases.METHODS if method in selected]
    base = tmp_path_factory.mktemp("bytes")
    names = {name: base / name for name in ("first", "second", "elsewhere", "again", "another seed")}
    separate_process.save_all(names["first"], methods, kept)
    separate_process.save_all(names["second"], methods)
    separate_process.save_all(names["another seed"], methods, partial(separate_process.explained, seed=1))
    folders = [str(names[name]) for name in ("first", "elsewhere", "again")]
    subprocess.run(
        [sys.executable, "-m", "tests.invariants.separate_process", *folders, *methods],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONHASHSEED": "12345"},
        check=True,
        timeout=300,
    )
    return {name: {path.name: path for path in folder.iterdir()} for name, folder in names.items()}


def files_of(method, folder):
    return {name: path for name, path in folder.items() if name.startswith(f"{method}.")}


@EACH_METHOD
@pytest.mark.parametrize("other", ["second", "elsewhere", "again"])
def test_same_seed_same_bytes(folders, method, other):
    mine = {name: path.read_bytes() for name, path in files_of(method, folders["first"]).items()}
    yours = {name: path.read_bytes() for name, path in files_of(method, folders[other]).items()}
    subjects = [subject for subject in cases.SUBJECTS if cases.applies(method, subject)]
    assert len(mine) == 3 * len(subjects) * len(cases.variants(method))
    assert mine.keys() == yours.keys()
    assert [name for name in mine if mine[name] != yours[name]] == []


@EACH_METHOD
def test_another_seed_changes_what_is_random_and_nothing_else(folders, method):
    changed = []
    for name, path in files_of(method, folders["first"]).items():
        one, other = clearhead.load_explanation(path), clearhead.load_explanation(folders["another seed"][name])
        assert (one.certificate["seed"], other.certificate["seed"]) == (0, 1)
        if not np.array_equal(one.scores, other.scores):
            changed.append(name)
    if method == "random":
        assert changed == list(files_of(method, folders["first"]))
    else:
        assert bool(changed) == (method in DRAWING), changed


@pytest.mark.parametrize("subject", cases.SUBJECTS)
def test_random_numbers_belong_to_the_content(subject):
    """Not to the place in a batch, the padding, the other inputs, the target or the order of calls."""
    ex, (a, b, c) = cases.explainer(subject), models.inputs(subject)
    alone = ex.explain(a, method="random").scores
    for batch, place in (([a, b, c], 0), ([c, b, a], 2), ([b, a], 1), ([a, a], 1)):
        assert np.array_equal(ex.explain(batch, method="random")[place].scores, alone)
    assert np.array_equal(ex.explain(a, method="random", target=1).scores, alone)
    assert np.array_equal(models.explainer(subject).explain(a, method="random").scores, alone)
    other = ex.explain(b, method="random").scores
    shared = min(len(alone), len(other))
    assert not np.array_equal(alone[:shared], other[:shared])
    assert not np.array_equal(ex.explain(a, method="random", seed=5).scores, alone)


@EACH_METHOD
def test_a_file_opens_as_what_was_saved(method, tmp_path):
    """Every field, types and dtypes included."""
    for subject in (subject for subject in cases.SUBJECTS if cases.applies(method, subject)):
        for place, explanations in enumerate(cases.batched(subject, method).values()):
            saved = explanations[0]
            opened = clearhead.load_explanation(saved.save(tmp_path / f"{place}.safetensors"))
            for field in fields(saved):
                one, other = getattr(saved, field.name), getattr(opened, field.name)
                if isinstance(one, np.ndarray):
                    assert one.dtype == other.dtype and np.array_equal(one, other), field.name
                else:
                    assert type(one) is type(other) and one == other, field.name
            assert opened.to_dict() == saved.to_dict()
