"""Loading from names, folders and objects: what is supported, what raises, and that the given model is unchanged."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import InputError, UnsupportedError
from tests.models import TEXTS, image_model, inputs, text_model

METHODS = ["generic", "grad-sam", "attcat", "input-x-gradient"]
IMAGE_ARRAY = inputs("vit/image")[0]


def save_model(folder: Path, model: Any, processor: Any) -> str:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def test_load_text_model_from_folder(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    ex = clearhead.load(save_model(tmp_path, model, tok))
    assert ex.explain(TEXTS[0], method="generic").scores == pytest.approx(
        clearhead.load((model, tok)).explain(TEXTS[0], method="generic").scores, abs=1e-6
    )
    assert ex.adapter.name == str(tmp_path) and not ex.adapter.model.training
    masked, tok = text_model("bert", "ForMaskedLM", torch.float32)
    ex = clearhead.load(Path(save_model(tmp_path / "masked", masked, tok)))
    assert type(ex.adapter).__name__ == "MaskedLMAdapter"


def test_load_from_folder_ignores_return_dict_false(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    expected = clearhead.load(model, tok).explain(TEXTS[0], method="generic").scores
    model.config.return_dict = False
    assert clearhead.load(save_model(tmp_path, model, tok)).explain(TEXTS[0], method="generic").scores == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ex: pickle.loads(pickle.dumps(ex))], ids=["copy", "pickle"])
def test_copied_explainer_is_independent_of_the_original(copied: Any) -> None:
    ex = clearhead.load(*text_model("bert"))
    expected = ex.explain(TEXTS[0], ["generic", "occlusion"])
    other = copied(ex)
    with torch.no_grad():
        for parameter in ex.adapter.model.parameters():
            parameter.zero_()
    for method, e in other.explain(TEXTS[0], ["generic", "occlusion"]).items():
        assert (e.scores == expected[method].scores).all() and abs(e.scores).max() > 0


@pytest.mark.parametrize("name", ["vit", "deit-distilled"])
def test_load_image_model_from_folder(name: str, tmp_path: Path) -> None:
    model, processor = image_model(name, torch.float32)
    ex = clearhead.load(save_model(tmp_path, model, processor))
    scores = ex.explain(IMAGE_ARRAY, method="generic").scores
    assert type(ex.adapter.model) is type(model)  # with the distillation head of DeiT
    assert scores == pytest.approx(
        clearhead.load(model, processor).explain(IMAGE_ARRAY, method="generic").scores, abs=1e-6
    )


def test_load_converts_dtype_and_device(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    folder = save_model(tmp_path, model.half(), tok)
    assert clearhead.load(folder).adapter.dtype == torch.float32  # converted on a CPU
    assert clearhead.load(folder, dtype="auto").adapter.dtype == torch.float16
    assert clearhead.load(folder, dtype="bfloat16").adapter.dtype == torch.bfloat16
    e = clearhead.load(folder, dtype=torch.float64, device="cpu").explain(TEXTS[0], method="generic")
    assert e.certificate["dtype"] == "float64" and e.certificate["device"] == "cpu"
    with pytest.raises(InputError, match="dtype='float33' is not recognised"):
        clearhead.load(folder, dtype="float33")
    with pytest.raises(InputError, match="device='nowhere' is not recognised"):
        clearhead.load(folder, device="nowhere")


def test_live_model_is_not_converted() -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    ex = clearhead.load((model, tok), dtype="float64")
    assert ex.adapter.dtype == torch.float64 and model.dtype == torch.float32 and ex.adapter.model is not model
    assert clearhead.load((model, tok), dtype="float32", device="cpu").adapter.model is model
    assert clearhead.load((model, tok), dtype="auto").adapter.model is model


def test_load_accepts_pipelines() -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    ex = clearhead.load(transformers.pipeline("text-classification", model=model, tokenizer=tok))
    assert ex.explain(TEXTS[0], method="generic").scores == pytest.approx(
        clearhead.load(model, tok).explain(TEXTS[0], method="generic").scores
    )
    model, tok = text_model("roberta", "ForMaskedLM", torch.float32)
    assert (
        clearhead.load(transformers.pipeline("fill-mask", model=model, tokenizer=tok))
        .explain("I <mask> it", method="generic")
        .tokens
    )
    model, processor = image_model("vit", torch.float32)
    ex = clearhead.load(transformers.pipeline("image-classification", model=model, image_processor=processor))
    assert ex.explain(IMAGE_ARRAY, method="generic").units.grid == (4, 4)


def test_peft_adapters_equal_the_merged_model() -> None:
    peft = pytest.importorskip("peft")
    model, tok = text_model("bert")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).double().eval()
    before = {name: parameter.clone() for name, parameter in adapted.state_dict().items()}
    adapted_results = clearhead.load(adapted, tok).explain(TEXTS, METHODS)
    assert all(torch.equal(parameter, before[name]) for name, parameter in adapted.state_dict().items())
    merged = clearhead.load(adapted.merge_and_unload(), tok).explain(TEXTS, METHODS)
    plain = clearhead.load(*text_model("bert")).explain(TEXTS, METHODS)
    for method in METHODS:
        for from_adapted, from_merged, from_plain in zip(
            adapted_results[method], merged[method], plain[method], strict=True
        ):
            assert from_adapted.scores == pytest.approx(from_merged.scores, abs=1e-10)
            assert from_adapted.prediction["top"][0]["logit"] == pytest.approx(
                from_merged.prediction["top"][0]["logit"]
            )
            assert np.abs(from_adapted.scores - from_plain.scores).max() > 1e-6


def test_peft_adapters_of_an_image_model_equal_the_merged_model() -> None:
    peft = pytest.importorskip("peft")
    model, processor = image_model("vit")
    names = sorted(
        {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    )
    target = [name for name in names if name in ("query", "value", "q_proj", "v_proj")]
    adapted = (
        peft.get_peft_model(model, peft.LoraConfig(target_modules=target, init_lora_weights=False)).double().eval()
    )
    adapted_results = clearhead.load(adapted, processor).explain(IMAGE_ARRAY, METHODS)
    merged = clearhead.load(adapted.merge_and_unload(), processor).explain(IMAGE_ARRAY, METHODS)
    for method in METHODS:
        assert adapted_results[method].scores == pytest.approx(merged[method].scores, abs=1e-6)


def test_pickled_weights_raise(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    folder = save_model(tmp_path, model, tok)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="Only safetensors files are loaded"):
        clearhead.load(folder)


def test_missing_head_weights_raise(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    base = model.bert
    base.config.architectures = ["BertForSequenceClassification"]
    from safetensors.torch import save_file

    save_model(tmp_path, model, tok)
    save_file(
        {f"bert.{name}": tensor for name, tensor in base.state_dict().items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(InputError, match=r"lacks weights of BertForSequenceClassification \(classifier\.bias"):
        clearhead.load(str(tmp_path))


def test_invalid_folders_raise(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot open"):
        clearhead.load(str(tmp_path))
    model, tok = text_model("bert", dtype=torch.float32)
    folder = save_model(tmp_path / "damaged", model, tok)
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="cannot load the weights"):
        clearhead.load(folder)
    model.save_pretrained(tmp_path / "alone")
    with pytest.raises(InputError, match="cannot load the model's tokenizer"):
        clearhead.load(str(tmp_path / "alone"))
    assert clearhead.load(str(tmp_path / "alone"), tok).explain(TEXTS[0], method="generic").tokens
    transformers.BertForPreTraining(model.config).save_pretrained(tmp_path / "heads")
    with pytest.raises(UnsupportedError, match="is a BertForPreTraining, which clearhead does not support"):
        clearhead.load(str(tmp_path / "heads"))
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="contains adapters"):
        clearhead.load(str(tmp_path / "adapters"))


def test_unknown_hub_name_without_network_raises() -> None:
    with pytest.raises(InputError, match="cannot open 'nobody/nothing'"):
        clearhead.load("nobody/nothing")


@pytest.mark.parametrize(
    ("unsupported", "message"),
    [
        (None, "cannot explain an object of type NoneType"),
        ((1, 2, 3), "a tuple of 3"),
        (torch.nn.Linear(2, 2), "cannot explain an object of type Linear"),
        ("", "cannot open ''"),
    ],
)
def test_unsupported_objects_raise(unsupported: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        clearhead.load(unsupported)


def test_unsupported_architectures_raise() -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    with pytest.raises(UnsupportedError, match="does not support BertForPreTraining"):
        clearhead.load(transformers.BertForPreTraining(config))


def test_load_zoo_model_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    zoo: Any = ModuleType("clearhead_zoo")
    zoo.__spec__ = type("Spec", (), {})()
    folder = save_model(tmp_path, model, tok)

    def path(name: str) -> Path:
        if name != "tiny":
            raise LookupError(f"the zoo has no model {name!r}")
        return Path(folder)

    zoo.path, zoo.names, zoo.card = path, lambda: ["tiny"], lambda name: {"name": name}
    monkeypatch.setitem(sys.modules, "clearhead_zoo", zoo)
    assert clearhead.load("zoo:tiny").explain(TEXTS[0], method="generic").tokens
    assert clearhead.zoo_models() == {"tiny": {"name": "tiny"}}
    with pytest.raises(InputError, match="the zoo has no model 'huge'"):
        clearhead.load("zoo:huge")


def test_load_without_installed_zoo_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.zoo.find_spec", lambda name: None)
    assert clearhead.zoo_models() == {}
    with pytest.raises(InputError, match="pip install clearhead-zoo"):
        clearhead.load("zoo:sentiment")


def test_code_in_a_model_folder_is_never_executed(tmp_path: Path) -> None:
    """Not even when 'y' is typed: no question is asked."""
    folder, marker = tmp_path / "evil", tmp_path / "ran"
    model, tok = text_model("bert", dtype=torch.float32)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    (folder / "conf.py").write_text(
        f"open({str(marker)!r}, 'w')\nfrom transformers import BertConfig, BertForSequenceClassification\n"
        "class Conf(BertConfig):\n    model_type = 'mine'\n"
    )
    stored_config = json.loads((folder / "config.json").read_text())
    program = "import sys\nimport clearhead as ch\ntry: ch.load(sys.argv[1])\nexcept ch.UnsupportedError as e: print(e)"
    for model_type in ("mine", "bert"):
        auto = {"AutoConfig": "conf.Conf", "AutoModelForSequenceClassification": "conf.BertForSequenceClassification"}
        (folder / "config.json").write_text(json.dumps({**stored_config, "model_type": model_type, "auto_map": auto}))
        command = [sys.executable, "-c", program, str(folder)]
        completed = subprocess.run(command, input="y\ny\n", capture_output=True, text=True, timeout=120)
        assert completed.returncode == 0 and completed.stdout.count("\n") == 1, completed.stdout + completed.stderr
        assert "contains its own code" in completed.stdout and not marker.exists()


def test_code_in_a_tokenizer_folder_is_never_executed(tmp_path: Path) -> None:
    folder, marker = tmp_path / "evil", tmp_path / "ran"
    model, tok = text_model("bert", dtype=torch.float32)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    (folder / "tok.py").write_text(f"open({str(marker)!r}, 'w')\nclass Tok: pass\n")
    stored_config = json.loads((folder / "tokenizer_config.json").read_text())
    stored_config |= {"auto_map": {"AutoTokenizer": ["tok.Tok", "tok.Tok"]}, "tokenizer_class": "Tok"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stored_config))
    program = "import sys, clearhead\ntry: clearhead.load(sys.argv[1])\nexcept clearhead.InputError as no: print(no)"
    command = [sys.executable, "-c", program, str(folder)]
    completed = subprocess.run(command, input="y\ny\n", capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0 and completed.stdout.count("\n") <= 1 and not marker.exists(), (
        completed.stdout + completed.stderr
    )


@pytest.mark.parametrize("dtype", ["int8", torch.int8, "bool", "complex64", "float8_e4m3fn"])
def test_dtypes_without_gradients_raise(dtype: Any) -> None:
    with pytest.raises(InputError, match="use float32, float64, float16 or bfloat16"):
        clearhead.load(*text_model("bert"), dtype=dtype)


def test_processor_of_another_modality_raises() -> None:
    text, tok = text_model("bert")
    image, processor = image_model("vit")
    with pytest.raises(InputError, match="takes images, but was loaded with a tokenizer"):
        clearhead.load(image, tok)
    with pytest.raises(
        InputError, match=r"takes texts, but was loaded with a ViTImageProcessor.*, which is not a tokenizer"
    ):
        clearhead.load(text, processor)


def test_tower_of_a_dual_encoder_raises() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision = {**sizes, "num_patches": 16, "patch_size": 4}
    config = transformers.Siglip2Config(vision_config=vision, text_config={**sizes, "vocab_size": 9})
    with pytest.raises(UnsupportedError, match=r"one tower of a dual encoder.*clip, metaclip_2, siglip") as raised:
        clearhead.load(transformers.Siglip2ForImageClassification(config))
    assert "\n" not in str(raised.value)
