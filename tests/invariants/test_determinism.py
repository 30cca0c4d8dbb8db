"""Invariants 6 and 7: the same seed gives the same bytes, also in a new process; files round-trip exactly."""

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
RANDOM_METHODS = {"random", "ensemble", "calibrated", "kernel-shap", "lime", "smoothgrad", "gradient-shap"}
RANDOM_METHODS |= {"deeplift-shap"}
RANDOM_METHODS |= {"beyond-intuition-head", "beyond-intuition-token", "tam"}  # with feedback="smoothed"
ROOT = Path(__file__).parents[2]


EACH_METHOD = pytest.mark.parametrize("method", cases.METHODS)


def cached_results(subject, methods):
    """The cached results of the other invariant tests, from a process that has computed many others."""
    return {variant: es for method in methods for variant, es in cases.batched(subject, method).items()}


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """Every explanation saved four times: twice here, once by a new process, once opened and resaved by it.

    Only the methods of selected tests, all in one process, as that takes seconds to start.
    """
    tests = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    selected = {test.callspec.params.get("method") for test in tests}
    methods = [method for method in cases.METHODS if method in selected]
    base = tmp_path_factory.mktemp("bytes")
    names = {name: base / name for name in ("first", "second", "new process", "resaved", "another seed")}
    separate_process.save_all(names["first"], methods, cached_results)
    separate_process.save_all(names["second"], methods)
    separate_process.save_all(names["another seed"], methods, partial(separate_process.explain_new, seed=1))
    folders = [str(names[name]) for name in ("first", "new process", "resaved")]
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
@pytest.mark.parametrize("other", ["second", "new process", "resaved"])
def test_same_seed_gives_identical_files(folders, method, other):
    expected = {name: path.read_bytes() for name, path in files_of(method, folders["first"]).items()}
    actual = {name: path.read_bytes() for name, path in files_of(method, folders[other]).items()}
    subjects = [subject for subject in cases.SUBJECTS if cases.applies(method, subject)]
    assert len(expected) == 3 * len(subjects) * len(cases.variants(method))
    assert expected.keys() == actual.keys()
    assert [name for name in expected if expected[name] != actual[name]] == []


@EACH_METHOD
def test_seed_changes_only_random_methods(folders, method):
    changed = []
    for name, path in files_of(method, folders["first"]).items():
        first, reseeded = clearhead.load_explanation(path), clearhead.load_explanation(folders["another seed"][name])
        assert (first.certificate["seed"], reseeded.certificate["seed"]) == (0, 1)
        if not np.array_equal(first.scores, reseeded.scores):
            changed.append(name)
    if method == "random":
        assert changed == list(files_of(method, folders["first"]))
    else:
        assert bool(changed) == (method in RANDOM_METHODS), changed


@pytest.mark.parametrize("subject", cases.SUBJECTS)
def test_random_scores_depend_only_on_input_and_seed(subject):
    """Not on the position in a batch, the padding, the other inputs, the target or the order of calls."""
    ex, (a, b, c) = cases.explainer(subject), models.inputs(subject)
    expected = ex.explain(a, method="random").scores
    for batch, index in (([a, b, c], 0), ([c, b, a], 2), ([b, a], 1), ([a, a], 1)):
        assert np.array_equal(ex.explain(batch, method="random")[index].scores, expected)
    assert np.array_equal(ex.explain(a, method="random", target=1).scores, expected)
    assert np.array_equal(models.explainer(subject).explain(a, method="random").scores, expected)
    other = ex.explain(b, method="random").scores
    shared = min(len(expected), len(other))
    assert not np.array_equal(expected[:shared], other[:shared])
    assert not np.array_equal(ex.explain(a, method="random", seed=5).scores, expected)


@EACH_METHOD
def test_file_round_trip_is_exact(method, tmp_path):
    """Every field, with types and dtypes."""
    for subject in (subject for subject in cases.SUBJECTS if cases.applies(method, subject)):
        for index, explanations in enumerate(cases.batched(subject, method).values()):
            saved = explanations[0]
            opened = clearhead.load_explanation(saved.save(tmp_path / f"{index}.safetensors"))
            for field in fields(saved):
                value, opened_value = getattr(saved, field.name), getattr(opened, field.name)
                if isinstance(value, np.ndarray):
                    assert value.dtype == opened_value.dtype and np.array_equal(value, opened_value), field.name
                else:
                    assert type(value) is type(opened_value) and value == opened_value, field.name
            assert opened.to_dict() == saved.to_dict()
