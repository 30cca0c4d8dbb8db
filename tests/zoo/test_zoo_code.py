"""The code models: how their data are made, and what they can do."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "packages" / "zoo" / "train"
DATA = ROOT.parent / "shared" / "data" / "code"
KINDS = {
    "code": "AutoModelForMaskedLM",
    "code-clone": "AutoModelForSequenceClassification",
    "code-translate": "AutoModelForSeq2SeqLM",
}
SUM = """
def total(values, start=0):
    result = start
    for value in values:
        if value > 3:
            result += value
        else:
            result = result - 1
    return max(result, 2)
"""
JAVA = "public int getSize() {if (mSize == null) {return 0;}return mSize;}"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The training scripts import their neighbours by bare name; so do we, and forget them afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if (SCRIPTS / f"{name}.py").exists():
            del sys.modules[name]


def run(text: str, *given: Any) -> Any:
    names: dict[str, Any] = {}
    exec(text, names)
    return next(own for own in names.values() if callable(own) and hasattr(own, "__code__"))(*given)


def test_rewritten_functions_do_the_same_and_mutants_do_not(script: Any) -> None:
    rewrites = script("code_rewrites")
    function = rewrites.parse_plain_function(SUM)
    rewriter = rewrites.Rewriter(
        [SUM, "def other(width, height):\n    area = width * height\n    return area, width"], 0
    )
    inputs = [([1, 5, 9],), ([4, 4], 7), ([],), ([3, 3, 8, 1], -2)]
    truth = [run(SUM, *one) for one in inputs]
    made = {rewriter.rewrite(function) for _ in range(20)}
    assert len(made) > 10 and all(ast.parse(text) for text in made)
    for text in made:
        assert [run(text, *one) for one in inputs] == truth, text
        assert "total" not in text.split("(")[0] or "start" not in text
    mutants = [ast.unparse(rewriter.mutate(function)) for _ in range(20)]
    changed = [any(run(text, *one) != said for one, said in zip(inputs, truth, strict=True)) for text in mutants]
    assert np.mean(changed) > 0.7, "most single changes show on these four inputs"
    assert rewrites.parse_plain_function("def f():\n    global x\n    x = locals()\n    return x") is None


@pytest.mark.parametrize(
    "text",
    [
        "def size(values, len=len):\n    count = len(values)\n    return len(values) + count",
        "def first(values):\n    found = [one for one in values if one]\n    return print(one, found)",
        "def users(name):\n    try:\n        import pwd\n    except OSError:\n        pwd = None\n    return pwd, name",
        "def made(a, b):\n    def inner(x, y):\n        return x - y\n    return inner(x=a, y=b)",
        "def depth(tree, level):\n    level = level + 1\n    return max(depth(one, level) for one in tree)",
        "def kind(it, other):\n    match it:\n        case [x, *_]:\n            return x, other\n    return other, it",
    ],
)
def test_functions_whose_names_cannot_be_exchanged_are_left_alone(script: Any, text: str) -> None:
    assert script("code_rewrites").parse_plain_function(text) is None


def test_rewriting_takes_no_name_that_is_taken_and_changes_no_list_of_others(script: Any) -> None:
    rewrites = script("code_rewrites")
    nested = (
        "def outer(x, y):\n    result = answer(x) + y\n    def inner(z):\n        return found(result, z)\n"
        "    def value():\n        return inner(y) + result\n    return value() * 2"
    )
    grown = "def grown(rows, more):\n    rows += more\n    rows += [1, 2]\n    return len(rows) + len(more)"
    names = {"answer": lambda x: 3 * x, "found": lambda a, b: a - b, "len": len}
    rewriter = rewrites.Rewriter([nested, grown, SUM], 1)
    for _ in range(40):
        text, own = rewriter.rewrite(rewrites.parse_plain_function(nested)), dict(names)
        exec(text, own)
        assert next(one for name, one in own.items() if f"def {name}(" in text)(5, 2) == 64, text
        text, seen = rewriter.rewrite(rewrites.parse_plain_function(grown)), [0]
        assert run(text, seen, [7]) == 5 and seen == [0, 7, 1, 2], text
    assert not rewrites.find_mutable_nodes(ast.parse("max(a, b)"))


def test_functions_are_stored_and_come_back(script: Any, tmp_path: Path) -> None:
    data = script("code_data")
    functions = data.EncodedFunctions.from_rows([[5, 6, 7], [8], [9, 10]])
    data.save_arrays(tmp_path / "train-java.npz.xz", functions)
    again = data.read_functions(tmp_path, "train", "java")
    assert [row.tolist() for row in map(again.__getitem__, range(len(again)))] == [[5, 6, 7], [8], [9, 10]]
    with pytest.raises(SystemExit, match="there is no file"):
        data.read_functions(tmp_path, "train", "cs")


def test_rows_are_framed_cut_and_set_side_by_side(script: Any) -> None:
    data, model, clone = script("code_data"), script("code_model"), script("code_clone")
    functions = data.EncodedFunctions.from_rows([[5, 6, 7], [8], [9, 10]])
    rows = model.FunctionRows([functions], "cpu")
    ids = model.add_special_ids(rows.collate(torch.tensor([0, 1])))
    assert ids.tolist() == [[0, 5, 6, 7, 2], [0, 8, 2, 1, 1]]
    pair = clone.join_pair_rows(rows, torch.tensor([1, 0]), torch.tensor([0, 2]))
    assert pair.tolist() == [[0, 8, 2, 2, 5, 6, 7, 2, 1], [0, 5, 6, 7, 2, 2, 9, 10, 2]]
    cut = model.FunctionRows([functions], "cpu", max_tokens=2)
    assert cut.lengths == [2, 1, 1, 2] and cut.collate(torch.tensor([1, 3])).tolist() == [[7, 1], [9, 10]]
    shown, chosen = model.mask_ids(ids.repeat(200, 1), torch.Generator().manual_seed(0))
    assert not chosen[ids.repeat(200, 1) < 5].any() and (shown[chosen] == 4).all()
    assert 0.1 < chosen.sum() / (4 * 200) < 0.2


def test_pairs_give_nothing_away_by_their_kinds(script: Any) -> None:
    """Pairs that do the same and pairs that do not are made of the same kinds of forms."""
    data, clone = script("code_data"), script("code_clone")
    forms = np.array([[0, 1, -1], [2, 3, -1], [4, 5, 6], [7, 8, 9]])
    near = np.array([[1] * 6, [0] * 6, [3] * 6, [-1] * 6])
    functions = data.EncodedFunctions.from_rows([[5 + place] for place in range(10)])
    pairs = clone.ClonePairSampler(data.CloneForms(functions, forms, near), torch.device("cpu"))
    chosen, same = pairs.draw(np.random.default_rng(0), 400)
    place = {form: (row, kind) for row, own in enumerate(forms) for kind, form in enumerate(own) if form >= 0}
    for (one, other), alike in zip(chosen, same, strict=True):
        (a, kind), (b, other_kind) = place[one], place[other]
        assert (a == b) == alike and kind != other_kind and (a < 2) == (b < 2)
    assert 0.4 < same.mean() < 0.6


def test_bleu_as_it_is_defined(script: Any) -> None:
    bleu = script("code_translate").compute_bleu
    assert bleu([[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5]]) == pytest.approx(1)
    # precisions 4/5, 3/4, 2/3, 1/2 and no penalty
    assert bleu([[1, 2, 3, 4, 9]], [[1, 2, 3, 4, 5]]) == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert bleu([[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6]]) == pytest.approx(np.exp(1 - 6 / 4))


# -- the finished models


def opened(name: str) -> tuple[Any, Any]:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    folder = clearhead_zoo.path(name)
    kind = getattr(transformers, KINDS[name])
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def test_tokens_do_not_cross_lexemes() -> None:
    from clearhead.studies.code.syntax import parse_source

    _, tokenizer = opened("code")
    spans = tokenizer(JAVA, return_offsets_mapping=True)["offset_mapping"][1:-1]
    bounds = {place for one in parse_source(JAVA, "java").lexemes for place in (one.start, one.stop)}
    for start, stop in spans:
        inner = [place for place in bounds if start < place < stop and JAVA[start:place].strip()]
        assert not inner, f"{JAVA[start:stop]!r} holds parts of two lexemes"
    assert "".join(JAVA[a:b] for a, b in spans) == JAVA


@torch.no_grad()
def test_masked_tokens_are_guessed() -> None:
    model, tokenizer = opened("code")
    asked = {
        "public int getSize() {if (mSize == <mask>) {return 0;}return mSize;}": "null",
        "def size(self):\n    return <mask>._size\n": "self",
        "public virtual int Count(){<mask> count;}": "return",
    }
    for text, word in asked.items():
        inputs = tokenizer(text, return_tensors="pt")
        place = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
        best = model(**inputs).logits[0, place].topk(3).indices
        assert word in [tokenizer.decode([one]).strip() for one in best], text


@torch.no_grad()
def test_clones_are_told_from_near_misses() -> None:
    model, tokenizer = opened("code-clone")
    same = (JAVA, "public virtual int GetSize(){if (mSize == null){return 0;}return mSize;}")
    other = (JAVA, "public virtual void SetName(string name){this.name = name;}")
    for pair, label in ((same, "same"), (other, "different")):
        logits = model(**tokenizer(*pair, return_tensors="pt")).logits
        assert model.config.id2label[int(logits.argmax())] == label


@torch.no_grad()
def test_java_becomes_c_sharp() -> None:
    model, tokenizer = opened("code-translate")
    inputs = tokenizer("public int size() {return mSize;}", return_tensors="pt")
    made = tokenizer.decode(model.generate(**inputs, max_length=60)[0], skip_special_tokens=True)
    assert made.startswith("public") and made.rstrip().endswith("}") and "return" in made


@pytest.mark.slow
@pytest.mark.parametrize("language", ["java", "cs"])
def test_held_out_functions_are_guessed_as_often_as_the_card_says(script: Any, language: str) -> None:
    model, tokenizer = opened("code")
    path = DATA / f"test.java-cs.txt.{language}"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine (data are not part of the repository)")
    data, train = script("code_data"), script("code_model")
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")[::10]
    rows = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
    _, right = train.compute_masked_loss(
        model, train.FunctionRows([data.EncodedFunctions.from_rows(rows)], "cpu", data.WINDOW_TOKENS)
    )
    claimed = clearhead_zoo.card("code")["figures"][f"top-1, {train.LANGUAGE_NAMES[language]}"]
    assert right == pytest.approx(claimed, abs=0.05)
