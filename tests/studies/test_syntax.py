"""Syntax by tree-sitter in every language: token classes, syntax parts, masks, and token alignment."""

import pytest

from clearhead.adapters.base import InputOptions
from clearhead.errors import InputError
from clearhead.studies.code.syntax import GRAMMARS, align_syntax, extract_functions, parse_source, resolve_language
from tests.models import explainer

#: Language → source, and lexemes of it in order with class and part.
SOURCES = {
    "python": (
        '@cached\ndef f(a, b=1):\n    # note\n    if a > b:\n        return g(a, "x")\n    for i in xs:\n'
        "        a += 1\n    return None\n",
        "@ annotation declaration¦cached identifier declaration¦def keyword declaration¦f identifier declaration¦"
        "( separator parameters¦1 number parameters¦# note comment comment¦if keyword condition¦> operator condition¦"
        'return keyword return¦g identifier call¦" string call¦for keyword loop¦xs identifier loop¦'
        "+= operator assignment¦return keyword return¦None constant return",
    ),
    "java": (
        '@Override public int f(String b) { /* note */ if (b == null) { return g(b, "x"); } '
        "for (int i = 0; i < 3; i++) { a += 1.5; } return true; }",
        "@ annotation declaration¦public modifier declaration¦int type declaration¦String identifier parameters¦"
        "/* note */ comment comment¦if keyword condition¦== operator condition¦null constant condition¦"
        "return keyword return¦g identifier call¦x string call¦; separator return¦for keyword loop¦"
        "= operator assignment¦< operator loop¦1.5 number assignment¦true constant return¦} separator declaration",
    ),
    "csharp": (
        'public virtual int F(string b){// note\nif (b == null) { return G(b, "x"); } '
        "foreach (var i in xs) { a += 1; } return new Foo(true); }",
        "virtual modifier declaration¦int type declaration¦string type parameters¦// note comment comment¦"
        "null constant condition¦G identifier call¦x string call¦foreach keyword loop¦xs identifier loop¦"
        "1 number assignment¦new keyword call¦true constant call",
    ),
    "go": (
        'package p\nfunc f(a int) (int, error) {\n\t// note\n\tif a > 1 { return g(a, "x"), nil }\n'
        "\tfor i := 0; i < 3; i++ { a += 1 }\n\treturn a, nil\n}\n",
        "package keyword import¦func keyword declaration¦a identifier parameters¦int type parameters¦error type "
        "parameters¦// note comment comment¦"
        "if keyword condition¦g identifier call¦x string call¦nil constant return¦for keyword loop¦:= operator "
        "assignment¦< operator loop¦+= operator assignment¦return keyword return",
    ),
    "javascript": (
        "function f(a, b = 1) { // note\n if (a > b) { return g(`t${a}`); } for (const i of xs) { a |= 1; } "
        "throw undefined; }",
        "function keyword declaration¦b identifier parameters¦1 number parameters¦// note comment comment¦"
        "> operator condition¦g identifier call¦t string call¦a identifier call¦for keyword loop¦"
        "|= operator assignment¦throw keyword exception¦undefined constant exception",
    ),
    "php": (
        'function f($a) { // note\n if ($a > 1) { return g($a, "x"); } foreach ($xs as $i) { $a += 1; } return null; }',
        "function keyword declaration¦$ identifier parameters¦a identifier parameters¦// note comment comment¦"
        "if keyword condition¦1 number condition¦g identifier call¦x string call¦foreach keyword loop¦"
        "xs identifier loop¦+= operator assignment¦null constant return",
    ),
    "ruby": (
        'def f(a, b = 1)\n  # note\n  if a > b\n    return g(a, "x #{a}")\n  end\n  while true\n'
        "    @x = nil\n  end\nend\n",
        "def keyword declaration¦f identifier declaration¦b identifier parameters¦1 number parameters¦"
        "# note comment comment¦if keyword condition¦> operator condition¦return keyword return¦g identifier call¦"
        "x  string call¦while keyword loop¦true constant loop¦@x identifier assignment¦nil constant assignment¦"
        "end keyword declaration",
    ),
}


def parse_expected(words):
    """Parse (text, class, part) of each lexeme, separated by bars; the text may contain spaces."""
    return [tuple(line.rsplit(" ", 2)) for line in words.split("¦")]


@pytest.mark.parametrize("language", GRAMMARS)
def test_lexemes_have_the_expected_class_and_part(language):
    text, words = SOURCES[language]
    source = parse_source(text, language)
    assert not source.has_errors
    lexemes = iter(
        [(text[lexeme.start : lexeme.stop], lexeme.token_class, lexeme.syntax_part) for lexeme in source.lexemes]
    )
    for expected_lexeme in parse_expected(words):
        assert expected_lexeme in lexemes, (
            f"{expected_lexeme} is not among the lexemes of {language}, or not in this order"
        )


@pytest.mark.parametrize("language", GRAMMARS)
def test_lexemes_cover_non_whitespace_exactly_once(language):
    text, _ = SOURCES[language]
    covered = [0] * len(text)
    for lexeme in parse_source(text, language).lexemes:
        for index in range(lexeme.start, lexeme.stop):
            covered[index] += 1
    assert all(count == 1 or character.isspace() for count, character in zip(covered, text, strict=True))
    assert max(covered) == 1


@pytest.mark.parametrize("language", ["java", "csharp", "javascript", "php"])
def test_methods_outside_a_class_are_parsed(language):
    text = {
        "java": "public Foo(int a) {this();b(a);}",
        "csharp": "public Foo(int a): this(){B(a);}",
        "javascript": "static foo(a) { return a; }",
        "php": "public function foo($a) { return $a; }",
    }[language]
    source = parse_source(text, language)
    assert not source.has_errors
    first, word = source.lexemes[0], text.split()[0]
    assert (text[first.start : first.stop], first.token_class, first.syntax_part) == (word, "modifier", "declaration")
    assert source.lexemes[-1].stop == len(text)


def test_syntax_error_sets_has_errors():
    assert parse_source("public int f( {", "java").has_errors


def test_docstrings_are_comments_and_other_strings_are_not():
    text = 'def f():\n    """Say it."""\n    return "it"\n'
    strings = {
        text[lexeme.start : lexeme.stop]: (lexeme.token_class, lexeme.syntax_part)
        for lexeme in parse_source(text, "python").lexemes
    }
    assert strings["Say it."] == ("comment", "comment") and strings["it"] == ("string", "return")


def test_extract_functions_finds_methods_and_assigned_functions():
    java = "class A { int f(int a) { return a; } A() { this.x = 1; } }"
    assert extract_functions(java, "java") == ["int f(int a) { return a; }", "A() { this.x = 1; }"]
    php = "<?php class A { public function f($a) { return $a; } }"
    assert extract_functions(php, "php") == ["public function f($a) { return $a; }"]
    assert extract_functions("class A\n  def f\n    1\n  end\nend\n", "ruby") == ["def f\n  1\nend"]
    js = "const f = (a) => a + 1;\nlet x = 2;\nvar g = function () {};\nclass A { h() { return 1; } }\nfunction* k() {}"
    functions = ["const f = (a) => a + 1;", "var g = function () {};", "h() { return 1; }", "function* k() {}"]
    assert extract_functions(js, "javascript") == functions


def test_offsets_are_characters_not_bytes():
    text = 'x = "naïve 😀" + y'
    last = parse_source(text, "python").lexemes[-1]
    assert text[last.start : last.stop] == "y"


def test_unknown_language_raises_and_aliases_resolve():
    with pytest.raises(InputError, match=r"unknown language 'pyton': did you mean 'python'.*csharp.*ruby"):
        parse_source("x", "pyton")
    assert [resolve_language(name) for name in ("C#", "js", "Go")] == ["csharp", "javascript", "go"]


def test_mask_span_shifts_later_lexemes_and_keeps_their_classes():
    text = "def f(a):\n    return a + total\n"
    start = text.index("total")
    masked = parse_source(text, "python").mask_span(start, start + 5, "<mask>")
    assert masked.text == "def f(a):\n    return a + <mask>\n"
    classes = {masked.text[lexeme.start : lexeme.stop]: lexeme.token_class for lexeme in masked.lexemes}
    assert classes["<mask>"] == "mask" and classes["+"] == "operator" and classes["return"] == "keyword"
    inside = parse_source(text, "python").mask_span(start, start + 2, "<mask>")
    assert [inside.text[lexeme.start : lexeme.stop] for lexeme in inside.lexemes][-2:] == ["<mask>", "tal"]


@pytest.mark.parametrize("name", ["roberta/mask", "bert/mask"])
def test_token_class_is_that_of_most_of_its_characters(name):
    ex = explainer(name)
    mask = ex.adapter.processor.mask_token
    text = f"if so:\n    {mask} (he)"
    source = parse_source("if so:\n    book (he)", "python").mask_span(11, 15, mask)
    (sample,) = ex.adapter.make_samples(text, InputOptions())
    alignment = align_syntax(sample.units, [source])
    assert (
        alignment.token_classes[0] == alignment.token_classes[-1] == "special"
        and alignment.token_classes.count("mask") == 1
    )
    spans = zip(sample.units.offsets, alignment.token_classes, strict=True)
    classes = {text[a:b].strip(): token_class for (a, b), token_class in spans if text[a:b].strip()}
    assert classes["("] == classes[")"] == classes[":"] == "separator" and classes["he"] == "identifier"
    assert classes[mask] == "mask"


def test_text_pairs_are_aligned_per_segment():
    ex = explainer("bert/classify")
    (sample,) = ex.adapter.make_samples(("x = 1", "return he"), InputOptions())
    alignment = align_syntax(sample.units, [parse_source("x = 1", "python"), parse_source("return he", "python")])
    spans = zip(sample.units.segments, sample.units.offsets, alignment.token_classes, strict=True)
    second = [token_class for segment, (a, b), token_class in spans if segment == 1 and b > a]
    assert second[-1] == "identifier" and set(second[:-1]) == {"keyword"}
    with pytest.raises(InputError, match="2 texts, but 1"):
        align_syntax(sample.units, [parse_source("x = 1", "python")])
