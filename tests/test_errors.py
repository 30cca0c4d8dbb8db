"""Invalid input through the public API: the right error, a helpful message, and an unchanged model."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import clearhead
from clearhead.errors import ClearheadWarning
from tests.models import explainer, image_model, text_model, tokenizer

TEXT = "I like the movie"


def snapshot_model(model: Any) -> tuple[Any, ...]:
    """Return everything in a model that a call could change."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().numpy().tobytes())
    modules = list(model.modules())
    return (
        digest.hexdigest(),
        model.config.to_json_string(),
        model.config._attn_implementation,
        [module.training for module in modules],
        [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in modules],
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.grad is None for parameter in model.parameters()],
    )


TEXT_CASES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda ex: ex.explain("", method="generic"), "the text is empty"),
    (lambda ex: ex.explain([TEXT, " \n"], method="generic"), "the text is empty"),
    (lambda ex: ex.explain((TEXT, ""), method="generic"), "the text is empty"),
    (lambda ex: ex.explain([], method="generic"), "the list is empty"),
    (lambda ex: ex.explain(), "nothing to explain"),
    (lambda ex: ex.explain(3, method="generic"), "expected a text"),
    (lambda ex: ex.explain(image=np.zeros((4, 4, 3), np.uint8), method="generic"), "takes text, but was given image="),
    (
        lambda ex: ex.explain(TEXT * 30, truncation=False, method="generic"),
        "the model takes at most 64: shorten it, or allow truncation",
    ),
    (
        lambda ex: ex.explain(TEXT, target="HAPPY", method="generic"),
        "unknown label 'HAPPY'. Accepted: LABEL_0, LABEL_1, LABEL_2",
    ),
    (lambda ex: ex.explain(TEXT, target="LABEL_02", method="generic"), "did you mean 'LABEL_2'?"),
    (lambda ex: ex.explain(TEXT, target=3, method="generic"), "label 3 does not exist: the model has 3 labels"),
    (lambda ex: ex.explain(TEXT, target=-1, method="generic"), "label -1 does not exist"),
    (lambda ex: ex.explain(TEXT, target=2.5, method="generic"), "is not a target"),
    (lambda ex: ex.explain(TEXT, target=True, method="generic"), "is not a target"),
    (lambda ex: ex.explain(TEXT, target=[0, 1], method="generic"), "has 2 targets for 1 inputs"),
    (lambda ex: ex.explain(TEXT, target=clearhead.Contrast(0, "HAPPY"), method="generic"), "unknown label 'HAPPY'"),
    (lambda ex: ex.explain(TEXT, target=lambda output: output.logits, method="generic"), "one number per sample"),
    (lambda ex: ex.explain(TEXT, method="grad-sm"), "did you mean 'grad-sam'?"),
    (lambda ex: ex.explain(TEXT, method=[]), "no method was given"),
    (lambda ex: ex.explain(TEXT, method=clearhead.Method("grad-sam", recieved=True)), "did you mean 'received'?"),
    (lambda ex: ex.explain(TEXT, scale="odds", method="generic"), "did you mean 'log-odds'?"),
    (lambda ex: ex.explain(TEXT, layers=(5, None), method="generic"), "selects none of the 3 layers"),
    (lambda ex: ex.explain(TEXT, heads=[4], method="generic"), "the model has 4 heads"),
    (lambda ex: ex.explain(TEXT, heads=[], method="generic"), "is not valid"),
    (lambda ex: ex.explain(TEXT, rows="some", method="generic"), "rows='some' is not valid"),
    (lambda ex: ex.explain(TEXT, method="saliency", heads=[0]), "saliency does not accept heads="),
    (lambda ex: ex.explain(TEXT, truncation_side="up", method="generic"), "truncation_side='up' is not valid"),
    (lambda ex: ex.explain(TEXT, batch_size=0, method="generic"), "batch_size=0"),
    (lambda ex: ex.explain(TEXT, answer=" yes", method="generic"), "generates no text: leave out answer= (--answer)"),
    (lambda ex: ex.explain(TEXT, max_new_tokens=3, method="generic"), "leave out max_new_tokens= (--max-new-tokens)"),
    (lambda ex: ex.record(TEXT, answer=[1, 2]), "generates no text: leave out answer= (--answer)"),
    (
        lambda ex: ex.explain(TEXT, target=clearhead.GeneratedToken(2), method="generic"),
        "the target is the generated token 2, but BertForSequenceClassification makes one prediction per input",
    ),
    (lambda ex: ex.explain({"attention_mask": torch.ones(1, 3)}, method="generic"), "but contain attention_mask"),
    (lambda ex: ex.explain({"input_ids": torch.ones(1, 3).long()}, tokens=["a"], method="generic"), "names 1 units"),
    (lambda ex: clearhead.compare(ex, TEXT, ["generic"]), "at least two methods"),
    (lambda ex: clearhead.compare(ex, [TEXT]), "one input"),
]


@pytest.mark.parametrize(("call", "message"), TEXT_CASES, ids=[message for _, message in TEXT_CASES])
def test_invalid_text_calls_raise(call: Callable[[Any], Any], message: str) -> None:
    ex = explainer("bert/classify")
    before = snapshot_model(ex.adapter.model)
    with pytest.raises(clearhead.InputError) as raised:
        call(ex)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert snapshot_model(ex.adapter.model) == before


def test_invalid_images_raise(tmp_path: Path) -> None:
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.jpg")
    content = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "letter.jpg").write_text("Dear Sir")
    Image.new("RGB", (8, 8)).save(tmp_path / "whole.png")
    broken = bytearray((tmp_path / "whole.png").read_bytes())
    broken[30] ^= 0xFF
    (tmp_path / "broken.png").write_bytes(broken)
    ex = explainer("vit/image")
    before = snapshot_model(ex.adapter.model)
    ex.explain(tmp_path / "whole.jpg", method="generic")
    for name in ("half.jpg", "letter.jpg", "broken.png"):
        with pytest.raises(clearhead.InputError, match="cannot be opened as an image"):
            ex.explain(tmp_path / name, method="generic")
    for raw_input, message in (
        (tmp_path / "lost.jpg", "there is no image"),
        (tmp_path, "cannot be opened as an image"),
        (np.zeros((4, 4, 3)), "must be uint8"),
        (7, "expected an image"),
    ):
        with pytest.raises(clearhead.InputError, match=message):
            ex.explain(raw_input, method="generic")
    assert snapshot_model(ex.adapter.model) == before


def make_models_without_attention() -> list[Any]:
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    convnext = transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4, image_size=32)
    fnet = transformers.FNetConfig(vocab_size=200, hidden_size=16, num_hidden_layers=2, intermediate_size=16)
    return [
        (transformers.ResNetForImageClassification(resnet), processor, np.zeros((32, 32, 3), np.uint8)),
        (transformers.ConvNextForImageClassification(convnext), processor, np.zeros((32, 32, 3), np.uint8)),
        (transformers.FNetForSequenceClassification(fnet), tokenizer("wordpiece"), TEXT),
    ]


@pytest.mark.parametrize("number", range(3), ids=["resnet", "convnext", "fnet"])
def test_models_without_attention_raise(number: int) -> None:
    model, processor, raw_input = make_models_without_attention()[number]
    model.eval()
    before = snapshot_model(model)
    ex = clearhead.load((model, processor))
    with pytest.raises(clearhead.UnsupportedError, match=f"{type(model).__name__} .* without attention"):
        ex.explain(raw_input, method="generic")
    assert not any(line.applies for line in ex.methods())
    assert snapshot_model(model) == before


def test_unsupported_objects_raise() -> None:
    model, tok = text_model("bert")
    with pytest.raises(clearhead.InputError, match="cannot explain an object of type Linear"):
        clearhead.load(torch.nn.Linear(2, 2))
    with pytest.raises(clearhead.InputError, match="cannot explain an object of type dict"):
        clearhead.load({})
    with pytest.raises(clearhead.InputError, match="a tuple of 3"):
        clearhead.load((model, tok, 1))
    with pytest.raises(clearhead.InputError, match="was loaded without a tokenizer"):
        clearhead.load(model).explain(TEXT, method="generic")
    with pytest.raises(clearhead.InputError, match="was loaded without an image processor"):
        clearhead.load(image_model("vit")[0]).explain(np.zeros((16, 16, 3), np.uint8), method="generic")
    with pytest.raises(clearhead.UnsupportedError, match="does not support BertForPreTraining"):
        clearhead.load(transformers.BertForPreTraining(model.config))


def test_models_with_return_dict_false_raise() -> None:
    model, tok = text_model("bert")
    ex = clearhead.load(model, tok)
    model.config.return_dict = False
    for call in (
        lambda: clearhead.load(model, tok),
        lambda: ex.explain(TEXT, method="generic"),
        lambda: ex.record(TEXT),
    ):
        with pytest.raises(clearhead.InputError, match=r"set model\.config\.return_dict = True"):
            call()
    model.config.return_dict = True
    assert len(ex.explain(TEXT, method="generic").scores)


def test_invalid_folders_and_names_raise(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    pickled = tmp_path / "pickled"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(pickled)
    tok.save_pretrained(pickled)
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(
        clearhead.InputError, match="Only safetensors files are loaded, because unpickling can execute code"
    ):
        clearhead.load(pickled)

    alone = tmp_path / "alone"
    model.save_pretrained(alone)
    with pytest.raises(clearhead.InputError, match="cannot load the model's tokenizer"):
        clearhead.load(alone)

    torn = tmp_path / "torn"
    model.save_pretrained(torn)
    tok.save_pretrained(torn)
    weights = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(clearhead.InputError, match="cannot load the weights"):
        clearhead.load(torn)

    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), str(tmp_path / "lost"), "no-one/nothing", "not a name", ""):
        with pytest.raises(clearhead.InputError, match="cannot open"):
            clearhead.load(name)
    with pytest.raises(clearhead.InputError, match="zoo"):
        clearhead.load("zoo:unicorn")
    with pytest.raises(clearhead.InputError, match="dtype='float3' is not recognised"):
        clearhead.load(model, tok, dtype="float3")
    with pytest.raises(clearhead.InputError, match="device='toaster' is not recognised"):
        clearhead.load(model, tok, device="toaster")
    assert model.device.type == "cpu" and model.dtype == torch.float32


def test_loading_other_files_as_explanations_raises(tmp_path: Path) -> None:
    path = explainer("bert/classify").explain(TEXT, method="generic").save(tmp_path / "why.safetensors")
    content = path.read_bytes()
    for invalid_content in (b"", content[:7], content[:60], content[:-1], b"hello" * 20):
        path.write_bytes(invalid_content)
        with pytest.raises(clearhead.InputError, match="is not an explanation saved by clearhead"):
            clearhead.load_explanation(path)
    with pytest.raises(clearhead.InputError, match="there is no file"):
        clearhead.load_explanation(tmp_path / "lost")
    with pytest.raises(clearhead.InputError):
        clearhead.load_explanation(tmp_path)
    with pytest.raises(clearhead.InputError, match="not an explanation"):
        clearhead.from_dict({})


def test_failed_write_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e = explainer("bert/classify").explain(TEXT, method="generic")
    path = e.save(tmp_path / "why.safetensors")
    before = path.read_bytes()

    def raise_disk_full(self: Path, content: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        e.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_write_error_contains_the_given_path(tmp_path: Path) -> None:
    path = tmp_path / "lost" / "why.safetensors"
    with pytest.raises(OSError, match="No such file") as raised:
        explainer("bert/classify").explain(TEXT, method="generic").save(path)
    assert raised.value.filename == str(path)


def test_nonfinite_scores_are_reported() -> None:
    """A gradient through a norm that divides by a tiny number overflows float16."""
    ex = explainer("bert/classify", torch.float16)
    with pytest.warns(
        ClearheadWarning, match=r"of tam are NaN or infinite, with the model in float16: .*dtype='float32'"
    ):
        ex.explain("She hates the book", "tam")
