"""Names, folders and objects: what opens, what is refused, and that the caller's own model stays as it was."""

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
PICTURE = inputs("vit/image")[0]


def saved(folder: Path, model: Any, processor: Any) -> str:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def test_folder_of_a_text_model(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    ex = clearhead.load(saved(tmp_path, model, tok))
    assert ex.explain(TEXTS[0]).scores == pytest.approx(clearhead.load((model, tok)).explain(TEXTS[0]).scores, abs=1e-6)
    assert ex.adapter.name == str(tmp_path) and not ex.adapter.model.training
    masked, tok = text_model("bert", "ForMaskedLM", torch.float32)
    ex = clearhead.load(Path(saved(tmp_path / "masked", masked, tok)))
    assert type(ex.adapter).__name__ == "MaskedLMAdapter"


def test_folder_with_return_dict_false(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    expected = clearhead.load(model, tok).explain(TEXTS[0]).scores
    model.config.return_dict = False
    assert clearhead.load(saved(tmp_path, model, tok)).explain(TEXTS[0]).scores == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ex: pickle.loads(pickle.dumps(ex))], ids=["copy", "pickle"])
def test_copies_and_pickles(copied: Any) -> None:
    ex = clearhead.load(*text_model("bert"))
    expected = ex.explain(TEXTS[0], ["generic", "occlusion"])
    other = copied(ex)
    with torch.no_grad():
        for parameter in ex.adapter.model.parameters():
            parameter.zero_()
    for method, e in other.explain(TEXTS[0], ["generic", "occlusion"]).items():
        assert (e.scores == expected[method].scores).all() and abs(e.scores).max() > 0


@pytest.mark.parametrize("name", ["vit", "deit-distilled"])
def test_folder_of_an_image_model(name: str, tmp_path: Path) -> None:
    model, processor = image_model(name, torch.float32)
    ex = clearhead.load(saved(tmp_path, model, processor))
    mine = ex.explain(PICTURE).scores
    assert type(ex.adapter.model) is type(model)  # not DeiT without its teacher
    assert mine == pytest.approx(clearhead.load(model, processor).explain(PICTURE).scores, abs=1e-6)


def test_dtypes_and_devices(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    folder = saved(tmp_path, model.half(), tok)
    assert clearhead.load(folder).adapter.dtype == torch.float32  # widened on a CPU
    assert clearhead.load(folder, dtype="auto").adapter.dtype == torch.float16
    assert clearhead.load(folder, dtype="bfloat16").adapter.dtype == torch.bfloat16
    e = clearhead.load(folder, dtype=torch.float64, device="cpu").explain(TEXTS[0])
    assert e.certificate["dtype"] == "float64" and e.certificate["device"] == "cpu"
    with pytest.raises(InputError, match="dtype='float33' is not known"):
        clearhead.load(folder, dtype="float33")
    with pytest.raises(InputError, match="device='nowhere' is not known"):
        clearhead.load(folder, device="nowhere")


def test_live_model_is_not_converted() -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    ex = clearhead.load((model, tok), dtype="float64")
    assert ex.adapter.dtype == torch.float64 and model.dtype == torch.float32 and ex.adapter.model is not model
    assert clearhead.load((model, tok), dtype="float32", device="cpu").adapter.model is model
    assert clearhead.load((model, tok), dtype="auto").adapter.model is model


def test_pipelines() -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    ex = clearhead.load(transformers.pipeline("text-classification", model=model, tokenizer=tok))
    assert ex.explain(TEXTS[0]).scores == pytest.approx(clearhead.load(model, tok).explain(TEXTS[0]).scores)
    model, tok = text_model("roberta", "ForMaskedLM", torch.float32)
    assert clearhead.load(transformers.pipeline("fill-mask", model=model, tokenizer=tok)).explain("I <mask> it").tokens
    model, processor = image_model("vit", torch.float32)
    ex = clearhead.load(transformers.pipeline("image-classification", model=model, image_processor=processor))
    assert ex.explain(PICTURE).units.grid == (4, 4)


def test_peft_adapters_equal_the_merged_model() -> None:
    peft = pytest.importorskip("peft")
    model, tok = text_model("bert")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).double().eval()
    before = {name: part.clone() for name, part in adapted.state_dict().items()}
    mine = clearhead.load(adapted, tok).explain(TEXTS, METHODS)
    assert all(torch.equal(part, before[name]) for name, part in adapted.state_dict().items())
    merged = clearhead.load(adapted.merge_and_unload(), tok).explain(TEXTS, METHODS)
    plain = clearhead.load(*text_model("bert")).explain(TEXTS, METHODS)
    for method in METHODS:
        for one, other, without in zip(mine[method], merged[method], plain[method], strict=True):
            assert one.scores == pytest.approx(other.scores, abs=1e-10)
            assert one.prediction["top"][0]["logit"] == pytest.approx(other.prediction["top"][0]["logit"])
            assert np.abs(one.scores - without.scores).max() > 1e-6


def test_peft_adapters_of_an_image_model() -> None:
    peft = pytest.importorskip("peft")
    model, processor = image_model("vit")
    names = sorted(
        {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    )
    target = [name for name in names if name in ("query", "value", "q_proj", "v_proj")]
    adapted = (
        peft.get_peft_model(model, peft.LoraConfig(target_modules=target, init_lora_weights=False)).double().eval()
    )
    mine = clearhead.load(adapted, processor).explain(PICTURE, METHODS)
    merged = clearhead.load(adapted.merge_and_unload(), processor).explain(PICTURE, METHODS)
    for method in METHODS:
        assert mine[method].scores == pytest.approx(merged[method].scores, abs=1e-6)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    folder = saved(tmp_path, model, tok)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="Only safetensors are opened"):
        clearhead.load(folder)


def test_missing_head_weights_are_refused(tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    base = model.bert
    base.config.architectures = ["BertForSequenceClassification"]
    from safetensors.torch import save_file

    saved(tmp_path, model, tok)
    save_file(
        {f"bert.{name}": part for name, part in base.state_dict().items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(InputError, match=r"lacks weights of BertForSequenceClassification \(classifier\.bias"):
        clearhead.load(str(tmp_path))


def test_invalid_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot open"):
        clearhead.load(str(tmp_path))
    model, tok = text_model("bert", dtype=torch.float32)
    folder = saved(tmp_path / "damaged", model, tok)
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="cannot load the weights"):
        clearhead.load(folder)
    model.save_pretrained(tmp_path / "alone")
    with pytest.raises(InputError, match="has no tokenizer that can be opened"):
        clearhead.load(str(tmp_path / "alone"))
    assert clearhead.load(str(tmp_path / "alone"), tok).explain(TEXTS[0]).tokens
    transformers.BertForPreTraining(model.config).save_pretrained(tmp_path / "heads")
    with pytest.raises(UnsupportedError, match="is a BertForPreTraining, which clearhead does not support"):
        clearhead.load(str(tmp_path / "heads"))
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="holds adapters"):
        clearhead.load(str(tmp_path / "adapters"))


def test_hub_name_without_network() -> None:
    with pytest.raises(InputError, match="cannot open 'nobody/nothing'"):
        clearhead.load("nobody/nothing")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "cannot explain a NoneType"),
        ((1, 2, 3), "a tuple of 3"),
        (torch.nn.Linear(2, 2), "cannot explain a Linear"),
        ("", "cannot open ''"),
    ],
)
def test_other_objects_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        clearhead.load(given)


def test_unsupported_architectures_are_refused() -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
    )
    with pytest.raises(UnsupportedError, match="does not know how to explain a BertForPreTraining"):
        clearhead.load(transformers.BertForPreTraining(config))


def test_zoo_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    zoo: Any = ModuleType("clearhead_zoo")
    zoo.__spec__ = type("Spec", (), {})()
    folder = saved(tmp_path, model, tok)

    def path(name: str) -> Path:
        if name != "tiny":
            raise LookupError(f"the zoo has no model {name!r}")
        return Path(folder)

    zoo.path, zoo.names, zoo.card = path, lambda: ["tiny"], lambda name: {"name": name}
    monkeypatch.setitem(sys.modules, "clearhead_zoo", zoo)
    assert clearhead.load("zoo:tiny").explain(TEXTS[0]).tokens
    assert clearhead.zoo_models() == {"tiny": {"name": "tiny"}}
    with pytest.raises(InputError, match="the zoo has no model 'huge'"):
        clearhead.load("zoo:huge")


def test_zoo_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.zoo.find_spec", lambda name: None)
    assert clearhead.zoo_models() == {}
    with pytest.raises(InputError, match="pip install clearhead-zoo"):
        clearhead.load("zoo:sentiment")


def test_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    """Not even for one who would say yes: nobody is asked."""
    folder, marker = tmp_path / "evil", tmp_path / "ran"
    model, tok = text_model("bert", dtype=torch.float32)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    (folder / "conf.py").write_text(
        f"open({str(marker)!r}, 'w')\nfrom transformers import BertConfig, BertForSequenceClassification\n"
        "class Conf(BertConfig):\n    model_type = 'mine'\n"
    )
    told = json.loads((folder / "config.json").read_text())
    program = "import sys\nimport clearhead as ch\ntry: ch.load(sys.argv[1])\nexcept ch.UnsupportedError as e: print(e)"
    for kind in ("mine", "bert"):
        auto = {"AutoConfig": "conf.Conf", "AutoModelForSequenceClassification": "conf.BertForSequenceClassification"}
        (folder / "config.json").write_text(json.dumps({**told, "model_type": kind, "auto_map": auto}))
        command = [sys.executable, "-c", program, str(folder)]
        ended = subprocess.run(command, input="y\ny\n", capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0 and ended.stdout.count("\n") == 1, ended.stdout + ended.stderr
        assert "contains its own code" in ended.stdout and not marker.exists()


def test_code_of_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    folder, marker = tmp_path / "evil", tmp_path / "ran"
    model, tok = text_model("bert", dtype=torch.float32)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    (folder / "tok.py").write_text(f"open({str(marker)!r}, 'w')\nclass Tok: pass\n")
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told |= {"auto_map": {"AutoTokenizer": ["tok.Tok", "tok.Tok"]}, "tokenizer_class": "Tok"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    program = "import sys, clearhead\ntry: clearhead.load(sys.argv[1])\nexcept clearhead.InputError as no: print(no)"
    command = [sys.executable, "-c", program, str(folder)]
    ended = subprocess.run(command, input="y\ny\n", capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stdout.count("\n") <= 1 and not marker.exists(), ended.stdout + ended.stderr


@pytest.mark.parametrize("dtype", ["int8", torch.int8, "bool", "complex64", "float8_e4m3fn"])
def test_dtypes_without_gradients_are_refused(dtype: Any) -> None:
    with pytest.raises(InputError, match="use float32, float64, float16 or bfloat16"):
        clearhead.load(*text_model("bert"), dtype=dtype)


def test_processor_of_another_model_type() -> None:
    text, tok = text_model("bert")
    image, processor = image_model("vit")
    with pytest.raises(InputError, match="takes pictures, but came with a tokenizer"):
        clearhead.load(image, tok)
    with pytest.raises(InputError, match=r"takes texts, but came with a ViTImageProcessor.*, which is no tokenizer"):
        clearhead.load(text, processor)


def test_tower_of_a_dual_encoder() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision = {**sizes, "num_patches": 16, "patch_size": 4}
    config = transformers.Siglip2Config(vision_config=vision, text_config={**sizes, "vocab_size": 9})
    with pytest.raises(UnsupportedError, match=r"half of a dual encoder.*clip, metaclip_2, siglip") as said:
        clearhead.load(transformers.Siglip2ForImageClassification(config))
    assert "\n" not in str(said.value)
