"""Code models of the zoo: data preparation, and quality of the finished models."""

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
AUTO_CLASSES = {
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
    """Import training scripts, which import each other by bare name, and unload them afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if (SCRIPTS / f"{name}.py").exists():
            del sys.modules[name]


def run_function(text: str, *arguments: Any) -> Any:
    names: dict[str, Any] = {}
    exec(text, names)
    function = next(value for value in names.values() if callable(value) and hasattr(value, "__code__"))
    return function(*arguments)


def test_rewrites_preserve_results_and_mutants_change_them(script: Any) -> None:
    rewrites = script("code_rewrites")
    function = rewrites.parse_plain_function(SUM)
    rewriter = rewrites.Rewriter(
        [SUM, "def other(width, height):\n    area = width * height\n    return area, width"], 0
    )
    inputs = [([1, 5, 9],), ([4, 4], 7), ([],), ([3, 3, 8, 1], -2)]
    expected = [run_function(SUM, *arguments) for arguments in inputs]
    rewrites_of_sum = {rewriter.rewrite(function) for _ in range(20)}
    assert len(rewrites_of_sum) > 10 and all(ast.parse(text) for text in rewrites_of_sum)
    for text in rewrites_of_sum:
        assert [run_function(text, *arguments) for arguments in inputs] == expected, text
        assert "total" not in text.split("(")[0] or "start" not in text
    mutants = [ast.unparse(rewriter.mutate(function)) for _ in range(20)]
    changed = [
        any(run_function(text, *arguments) != result for arguments, result in zip(inputs, expected, strict=True))
        for text in mutants
    ]
    assert np.mean(changed) > 0.7, "most mutations change a result on these four inputs"
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
def test_functions_with_names_that_cannot_be_renamed_are_rejected(script: Any, text: str) -> None:
    assert script("code_rewrites").parse_plain_function(text) is None


def test_rewrites_avoid_name_clashes_and_keep_in_place_updates(script: Any) -> None:
    rewrites = script("code_rewrites")
    nested = (
        "def outer(x, y):\n    result = answer(x) + y\n    def inner(z):\n        return found(result, z)\n"
        "    def value():\n        return inner(y) + result\n    return value() * 2"
    )
    grown = "def grown(rows, more):\n    rows += more\n    rows += [1, 2]\n    return len(rows) + len(more)"
    names = {"answer": lambda x: 3 * x, "found": lambda a, b: a - b, "len": len}
    rewriter = rewrites.Rewriter([nested, grown, SUM], 1)
    for _ in range(40):
        text, namespace = rewriter.rewrite(rewrites.parse_plain_function(nested)), dict(names)
        exec(text, namespace)
        assert next(function for name, function in namespace.items() if f"def {name}(" in text)(5, 2) == 64, text
        text, rows = rewriter.rewrite(rewrites.parse_plain_function(grown)), [0]
        assert run_function(text, rows, [7]) == 5 and rows == [0, 7, 1, 2], text
    assert not rewrites.find_mutable_nodes(ast.parse("max(a, b)"))


def test_encoded_functions_round_trip_through_a_file(script: Any, tmp_path: Path) -> None:
    data = script("code_data")
    functions = data.EncodedFunctions.from_rows([[5, 6, 7], [8], [9, 10]])
    data.save_arrays(tmp_path / "train-java.npz.xz", functions)
    reloaded = data.read_functions(tmp_path, "train", "java")
    assert [row.tolist() for row in map(reloaded.__getitem__, range(len(reloaded)))] == [[5, 6, 7], [8], [9, 10]]
    with pytest.raises(SystemExit, match="there is no file"):
        data.read_functions(tmp_path, "train", "cs")


def test_rows_are_padded_truncated_and_joined_to_pairs(script: Any) -> None:
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


def test_clone_labels_are_independent_of_the_kinds_of_forms(script: Any) -> None:
    """Positive and negative pairs consist of the same kinds of forms."""
    data, clone = script("code_data"), script("code_clone")
    forms = np.array([[0, 1, -1], [2, 3, -1], [4, 5, 6], [7, 8, 9]])
    near = np.array([[1] * 6, [0] * 6, [3] * 6, [-1] * 6])
    functions = data.EncodedFunctions.from_rows([[5 + index] for index in range(10)])
    pairs = clone.ClonePairSampler(data.CloneForms(functions, forms, near), torch.device("cpu"))
    chosen, same = pairs.draw(np.random.default_rng(0), 400)
    location = {
        form: (row, kind) for row, row_forms in enumerate(forms) for kind, form in enumerate(row_forms) if form >= 0
    }
    for (first, second), is_same in zip(chosen, same, strict=True):
        (a, kind), (b, other_kind) = location[first], location[second]
        assert (a == b) == is_same and kind != other_kind and (a < 2) == (b < 2)
    assert 0.4 < same.mean() < 0.6


def test_bleu_equals_its_definition(script: Any) -> None:
    bleu = script("code_translate").compute_bleu
    assert bleu([[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5]]) == pytest.approx(1)
    # precisions 4/5, 3/4, 2/3, 1/2 and no penalty
    assert bleu([[1, 2, 3, 4, 9]], [[1, 2, 3, 4, 5]]) == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert bleu([[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6]]) == pytest.approx(np.exp(1 - 6 / 4))


# -- the finished models


def load_model(name: str) -> tuple[Any, Any]:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    folder = clearhead_zoo.path(name)
    model_class = getattr(transformers, AUTO_CLASSES[name])
    model, report = model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def test_tokens_do_not_cross_lexemes() -> None:
    from clearhead.studies.code.syntax import parse_source

    _, tokenizer = load_model("code")
    spans = tokenizer(JAVA, return_offsets_mapping=True)["offset_mapping"][1:-1]
    bounds = {bound for lexeme in parse_source(JAVA, "java").lexemes for bound in (lexeme.start, lexeme.stop)}
    for start, stop in spans:
        inner = [bound for bound in bounds if start < bound < stop and JAVA[start:bound].strip()]
        assert not inner, f"{JAVA[start:stop]!r} holds parts of two lexemes"
    assert "".join(JAVA[a:b] for a, b in spans) == JAVA


@torch.no_grad()
def test_masked_token_is_among_the_top_3() -> None:
    model, tokenizer = load_model("code")
    questions = {
        "public int getSize() {if (mSize == <mask>) {return 0;}return mSize;}": "null",
        "def size(self):\n    return <mask>._size\n": "self",
        "public virtual int Count(){<mask> count;}": "return",
    }
    for text, word in questions.items():
        inputs = tokenizer(text, return_tensors="pt")
        mask_position = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
        best = model(**inputs).logits[0, mask_position].topk(3).indices
        assert word in [tokenizer.decode([token]).strip() for token in best], text


@torch.no_grad()
def test_clone_model_classifies_a_same_and_a_different_pair() -> None:
    model, tokenizer = load_model("code-clone")
    same = (JAVA, "public virtual int GetSize(){if (mSize == null){return 0;}return mSize;}")
    other = (JAVA, "public virtual void SetName(string name){this.name = name;}")
    for pair, label in ((same, "same"), (other, "different")):
        logits = model(**tokenizer(*pair, return_tensors="pt")).logits
        assert model.config.id2label[int(logits.argmax())] == label


@torch.no_grad()
def test_translation_generates_a_complete_method() -> None:
    model, tokenizer = load_model("code-translate")
    inputs = tokenizer("public int size() {return mSize;}", return_tensors="pt")
    generated = tokenizer.decode(model.generate(**inputs, max_length=60)[0], skip_special_tokens=True)
    assert generated.startswith("public") and generated.rstrip().endswith("}") and "return" in generated


@pytest.mark.slow
@pytest.mark.parametrize("language", ["java", "cs"])
def test_masked_accuracy_on_held_out_functions_equals_card(script: Any, language: str) -> None:
    model, tokenizer = load_model("code")
    path = DATA / f"test.java-cs.txt.{language}"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine (data are not part of the repository)")
    data, train = script("code_data"), script("code_model")
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")[::10]
    rows = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
    _, accuracy = train.compute_masked_loss(
        model, train.FunctionRows([data.EncodedFunctions.from_rows(rows)], "cpu", data.WINDOW_TOKENS)
    )
    stated = clearhead_zoo.card("code")["figures"][f"top-1, {train.LANGUAGE_NAMES[language]}"]
    assert accuracy == pytest.approx(stated, abs=0.05)
