"""Original checkpoints are converted to equal Transformers models; unexpected weights raise and are not dropped."""

import argparse
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import clearhead
from clearhead.errors import InputError, UnsupportedError
from tests import models
from tests import original_checkpoints as original
from tests.models import text_model

LABELS = ["ant", "bee", "cat", "dog", "eel"]


def make_images(size: int = 12) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, size, size, dtype=torch.float64)


def save_checkpoint(path: Path, weights: Any) -> Path:
    torch.save(weights, path)
    return path


def to_float32(state: Any) -> dict[str, Tensor]:
    """Return the weights in float32, as checkpoint files store them; tests compare in float64."""
    return {name: tensor.float() for name, tensor in state.items()}


def round_to_float32(model: Any) -> Any:
    """Round the weights of the original model to float32, as a checkpoint file does."""
    return model.float().double()


def convert_and_load(
    tmp_path: Path, weights: Any, family: str, **options: Any
) -> tuple[Any, clearhead.ConversionResult]:
    result = clearhead.convert_checkpoint(
        save_checkpoint(tmp_path / "original.pth", weights), tmp_path / "made", family, trusted=True, **options
    )
    model_class = getattr(transformers, result.architecture)
    return model_class.from_pretrained(tmp_path / "made", use_safetensors=True).double().eval(), result


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).detach().abs().max() / expected.detach().abs().max()) < 1e-6


# --- vision transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pool", "architecture"),
    [
        ("vit", "token", "ViTForImageClassification"),
        ("deit", "token", "ViTForImageClassification"),
        ("deit", "dist", "DeiTForImageClassificationWithTeacher"),
        ("vit", "avg", "BeitForImageClassification"),
        ("mae", "avg", "BeitForImageClassification"),
    ],
)
@pytest.mark.parametrize("wrapped", ["plain", "model", "module"])
def test_timm_checkpoint_equals_original(
    tmp_path: Path, family: str, pool: str, architecture: str, wrapped: str
) -> None:
    reference = round_to_float32(original.spread(original.VisionTransformer(pool)))
    state = to_float32(reference.state_dict())
    weights: Any = {"plain": state, "model": {"model": state, "epoch": 3}}.get(wrapped)
    weights = weights or {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}
    model, result = convert_and_load(tmp_path, weights, family, class_names=LABELS)
    assert result.architecture == architecture and result.assumed == {"num_heads": 1} and not result.skipped_tensors
    assert_same(model(make_images()).logits, reference(make_images()))
    assert model.config.id2label == dict(enumerate(LABELS)) and model.config.image_size == 12


@pytest.mark.parametrize("pool", ["token", "dist", "avg"])
def test_converted_model_can_be_explained(tmp_path: Path, pool: str) -> None:
    if pool == "avg":
        models.skip_if_not_yet("beit")  # which a mean over patches becomes
    weights = to_float32(original.spread(original.VisionTransformer(pool)).state_dict())
    convert_and_load(tmp_path, weights, "deit", class_names=LABELS)
    e = clearhead.load(str(tmp_path / "made")).explain(
        (make_images(20)[0].permute(1, 2, 0) * 60 + 120).byte().numpy(), method="generic"
    )
    assert e.units.grid == (3, 3) and e.prediction["label"] in LABELS and e.scores.max() > 0


def test_image_preprocessing_depends_on_the_family(tmp_path: Path) -> None:
    weights = to_float32(original.spread(original.VisionTransformer()).state_dict())
    result = clearhead.convert_checkpoint(
        save_checkpoint(tmp_path / "a.pth", weights), tmp_path / "vit", "vit", trusted=True
    )
    clearhead.convert_checkpoint(tmp_path / "a.pth", tmp_path / "deit", "deit", trusted=True)
    preprocessing = [json.loads((tmp_path / name / "preprocessor_config.json").read_text()) for name in ("vit", "deit")]
    assert preprocessing[0]["image_mean"] == [0.5] * 3 and preprocessing[0]["size"] == {"height": 12, "width": 12}
    assert preprocessing[1]["image_mean"] == [0.485, 0.456, 0.406] and preprocessing[1]["crop_size"] == {
        "height": 12,
        "width": 12,
    }
    assert preprocessing[1]["size"] == {"shortest_edge": 14}
    assert result.to_dict()["architecture"] == "ViTForImageClassification"


def test_given_head_count_and_missing_qkv_bias_are_converted(tmp_path: Path) -> None:
    reference = round_to_float32(original.spread(original.VisionTransformer(heads=4, bias=False)))
    model, result = convert_and_load(tmp_path, to_float32(reference.state_dict()), "vit", num_heads=4)
    assert_same(model(make_images()).logits, reference(make_images()))
    assert result.assumed == {"num_heads": 4} and model.config.qkv_bias is False
    with pytest.raises(InputError, match="pass num_heads="):
        clearhead.convert_checkpoint(tmp_path / "original.pth", tmp_path / "other", "vit", trusted=True, num_heads=7)


def test_dino_teacher_and_linear_classifier_equal_original(tmp_path: Path) -> None:
    """A training checkpoint holds student and teacher; the linear classifier is a separate file."""
    reference = round_to_float32(original.spread(original.VisionTransformer(None)))
    state = to_float32(reference.state_dict())
    teacher = {f"backbone.{name}": tensor for name, tensor in state.items()}
    checkpoint = {
        "student": {f"module.{name}": torch.zeros_like(tensor) for name, tensor in teacher.items()},
        "teacher": teacher | {"head.mlp.0.weight": torch.ones(3, 3), "head.last_layer.weight_v": torch.ones(3, 3)},
    }
    model, result = convert_and_load(tmp_path, checkpoint, "dino")
    assert result.architecture == "ViTModel" and set(result.skipped_tensors) == {
        "head.last_layer.weight_v",
        "head.mlp.0.weight",
    }
    assert_same(model(make_images()).last_hidden_state, reference(make_images()))
    linear = original.spread(nn.Linear(2 * original.WIDE, 5)).float()
    head = {"state_dict": {f"module.linear.{name}": tensor for name, tensor in linear.state_dict().items()}}
    result = clearhead.convert_checkpoint(
        save_checkpoint(tmp_path / "backbone.pth", state),
        tmp_path / "classifier",
        "dino",
        trusted=True,
        head_file=save_checkpoint(tmp_path / "linear.pth", head),
        class_names=LABELS,
    )
    assert result.architecture == "Dinov2ForImageClassification"
    classifier = transformers.Dinov2ForImageClassification.from_pretrained(tmp_path / "classifier").double().eval()
    assert_same(classifier(make_images()).logits, linear.double()(original.dino_features(reference, make_images())))
    e = clearhead.load(classifier).explain({"pixel_values": make_images()[:1]}, method="generic")
    assert e.certificate["readout"] == "first + patches" and e.certificate["readout_checked"]


def test_linear_classifier_over_several_layers_raises(tmp_path: Path) -> None:
    state = to_float32(original.VisionTransformer(None).state_dict())
    head = save_checkpoint(
        tmp_path / "linear.pth", {"linear.weight": torch.ones(5, 4 * 64), "linear.bias": torch.ones(5)}
    )
    with pytest.raises(InputError, match="input is 4 times the width"):
        clearhead.convert_checkpoint(
            save_checkpoint(tmp_path / "a.pth", state), tmp_path / "made", "dino", trusted=True, head_file=head
        )


def test_moco_encoder_and_linear_probe_equal_original(tmp_path: Path) -> None:
    reference = round_to_float32(original.spread(original.VisionTransformer(None)))
    state = to_float32(reference.state_dict())
    pretrained = {
        "state_dict": {
            **{f"module.base_encoder.{name}": tensor for name, tensor in state.items()},
            **{f"module.momentum_encoder.{name}": tensor + 1 for name, tensor in state.items()},
            **{"module.base_encoder.head.0.weight": torch.ones(2, 2), "module.predictor.0.weight": torch.ones(2, 2)},
        }
    }
    model, result = convert_and_load(tmp_path, pretrained, "moco")
    assert result.architecture == "ViTModel" and "head.0.weight" in result.skipped_tensors
    assert_same(model(make_images()).last_hidden_state, reference(make_images()))
    probe = round_to_float32(original.spread(original.VisionTransformer("token")))
    state = {f"module.{name}": tensor for name, tensor in to_float32(probe.state_dict()).items()}
    clearhead.convert_checkpoint(
        save_checkpoint(tmp_path / "b.tar", {"state_dict": state}), tmp_path / "probe", "moco", trusted=True
    )
    converted_probe = transformers.ViTForImageClassification.from_pretrained(tmp_path / "probe").double().eval()
    assert_same(converted_probe(make_images()).logits, probe(make_images()))


def test_default_head_count_depends_on_family_and_width() -> None:
    from clearhead.studies.checkpoints.reader import ConversionSettings
    from clearhead.studies.checkpoints.vit import _HEADS_BY_FAMILY_AND_WIDTH, _HEADS_BY_WIDTH

    assert ConversionSettings("moco").get_num_heads(384, _HEADS_BY_FAMILY_AND_WIDTH["moco"]) == 12
    assert ConversionSettings("dino").get_num_heads(384, _HEADS_BY_WIDTH) == 6
    assert ConversionSettings("mae").get_num_heads(1280, _HEADS_BY_WIDTH) == 16


def test_mae_encoder_equals_original(tmp_path: Path) -> None:
    reference = round_to_float32(original.spread(original.VisionTransformer(None)))
    state = to_float32(reference.state_dict()) | {
        "mask_token": torch.ones(1, 1, 8),
        "decoder_blocks.0.norm1.bias": torch.ones(8),
    }
    model, result = convert_and_load(tmp_path, {"model": state}, "mae")
    assert result.architecture == "ViTModel" and len(result.skipped_tensors) == 2
    assert_same(model(make_images()).last_hidden_state, reference(make_images()))


# --- the other families -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scripted", [False, True])
def test_clip_equals_original(tmp_path: Path, scripted: bool) -> None:
    reference = round_to_float32(original.spread(original.CLIP()))
    text = torch.tensor([[28, 3, 9, 29, 0, 0, 0], [28, 5, 29, 0, 0, 0, 0]])
    path = tmp_path / "original.pt"
    if scripted:  # OpenAI's own files are archives of TorchScript
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, and tracing fixes shapes
            torch.jit.trace(reference.float(), (make_images().float(), text), check_trace=False).save(str(path))
        reference = reference.double()
    else:
        sizes = {
            "input_resolution": torch.tensor(12),
            "context_length": torch.tensor(7),
            "vocab_size": torch.tensor(30),
        }
        torch.save(to_float32(reference.state_dict()) | sizes, path)
    result = clearhead.convert_checkpoint(path, tmp_path / "made", "clip", trusted=True)
    assert result.assumed == {"num_heads": {"text": 2, "image": 2}} and result.missing == "tokenizer"
    assert result.used_pickle is scripted
    model = transformers.CLIPModel.from_pretrained(tmp_path / "made").double().eval()
    output = model(input_ids=text, pixel_values=make_images(), attention_mask=torch.ones_like(text))
    assert_same(output.logits_per_image, reference(make_images(), text))
    inputs = {"input_ids": text[:1, :4], "pixel_values": make_images()[:1]}
    assert clearhead.load(model).explain(inputs, method="generic")["image"].scores.shape == (10,)


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    state = {name: tensor.half() for name, tensor in original.spread(original.CLIP()).state_dict().items()}
    clearhead.convert_checkpoint(save_checkpoint(tmp_path / "a.pt", state), tmp_path / "made", "clip", trusted=True)
    assert {tensor.dtype for tensor in load_file(tmp_path / "made" / "model.safetensors").values()} == {torch.float32}


def test_clip_with_resnet_raises(tmp_path: Path) -> None:
    weights = {"visual.layer1.0.conv1.weight": torch.ones(1)}
    with pytest.raises(UnsupportedError, match="ResNet image encoder"):
        clearhead.convert_checkpoint(
            save_checkpoint(tmp_path / "a.pt", weights), tmp_path / "made", "clip", trusted=True
        )


@pytest.mark.parametrize("kind", ["bottleneck", "basic"])
def test_detr_equals_original(tmp_path: Path, kind: str) -> None:
    resnet: Any = transformers.ResNetConfig
    backbone = resnet(
        embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[2, 1, 1, 2], layer_type=kind, out_features=["stage4"]
    )
    sizes: dict[str, Any] = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 8, f"{side}_ffn_dim": 24}
    sizes |= {"d_model": 32, "num_queries": 5, "num_labels": 4}
    config = transformers.DetrConfig(backbone_config=backbone, **sizes)
    reference: Any = original.spread(transformers.DetrForObjectDetection(config)).float()
    reference.save_pretrained(tmp_path / "twin")
    state = original.original_detr(load_file(tmp_path / "twin" / "model.safetensors"))
    assert {"transformer.encoder.layers.1.self_attn.in_proj_weight", "backbone.0.body.layer4.1.bn1.weight"} <= set(
        state
    )
    assert not any(name.startswith("model.") for name in state)
    model, result = convert_and_load(tmp_path, {"model": state}, "detr", class_names=LABELS[:4])
    assert result.architecture == "DetrForObjectDetection" and result.assumed["num_heads"] == 8
    pixels = make_images(64)
    expected, actual = reference.double()(pixels), model(pixels)
    assert_same(actual.logits, expected.logits)
    assert_same(actual.pred_boxes, expected.pred_boxes)
    assert model.config.id2label[3] == "dog"


@pytest.mark.parametrize("wrapped", ["plain", "module.", "model.", "gamma"])
def test_bert_equals_original(tmp_path: Path, wrapped: str) -> None:
    reference, tok = text_model("bert", dtype=torch.float32)
    reference.save_pretrained(tmp_path / "twin")
    tok.save_pretrained(tmp_path / "tokenizer")
    state = load_file(tmp_path / "twin" / "model.safetensors")
    state["bert.embeddings.position_ids"] = torch.arange(70)[None]
    if wrapped == "gamma":
        old_names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, ending in old_names.items():
            state = {name.replace(new, ending): tensor for name, tensor in state.items()}
    elif wrapped != "plain":
        state = {f"{wrapped}{name}": tensor for name, tensor in state.items()}
    model, result = convert_and_load(
        tmp_path, state, "bert", num_heads=4, class_names=LABELS[:3], tokenizer=str(tmp_path / "tokenizer")
    )
    assert result.architecture == "BertForSequenceClassification" and result.missing is None
    inputs = tok("I like the movie.", return_tensors="pt")
    assert_same(model(**inputs).logits, reference.double()(**inputs).logits)
    e = clearhead.load(str(tmp_path / "made")).explain("I like the movie.", method="generic")
    assert e.prediction["label"] in LABELS[:3]


@pytest.mark.parametrize(("head", "architecture"), [("Model", "BertModel"), ("ForMaskedLM", "BertForMaskedLM")])
def test_bert_with_other_heads_equals_original(tmp_path: Path, head: str, architecture: str) -> None:
    reference, tok = text_model("bert", head, dtype=torch.float32)
    reference.save_pretrained(tmp_path / "twin")
    state = load_file(tmp_path / "twin" / "model.safetensors")
    if head == "ForMaskedLM":
        state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"].clone()
        state["cls.seq_relationship.weight"] = torch.ones(2, 32)
    else:
        state = {f"bert.{name}": tensor for name, tensor in state.items()}
    model, result = convert_and_load(tmp_path, state, "bert", num_heads=4)
    assert result.architecture == architecture
    inputs = tok("I like the movie.", return_tensors="pt")
    assert_same(model(**inputs)[0], reference.double()(**inputs)[0])
    with pytest.raises(InputError, match="the file has no classifier"):
        clearhead.convert_checkpoint(
            tmp_path / "original.pth", tmp_path / "b", "bert", trusted=True, num_heads=4, class_names=["a"]
        )


# --- files --------------------------------------------------------------------------------------------------------


class MaliciousPayload:
    """A payload that unpickling executes."""

    def __reduce__(self) -> Any:
        return exec, ("import pathlib, os; pathlib.Path(os.environ['HARM']).write_text('done')",)


def test_pickle_is_not_executed_unless_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "harm"
    monkeypatch.setenv("HARM", str(marker))
    state = to_float32(original.VisionTransformer().state_dict())
    file = save_checkpoint(tmp_path / "a.pth", {"model": state, "harm": MaliciousPayload()})
    with pytest.raises(UnsupportedError, match=r"can execute arbitrary code .* --i-trust-this-file"):
        clearhead.convert_checkpoint(file, tmp_path / "made", "vit")
    assert not marker.exists() and not (tmp_path / "made").exists()
    result = clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=True)
    assert result.used_pickle and marker.exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_file_that_is_no_checkpoint_raises(tmp_path: Path, trusted: bool) -> None:
    file = tmp_path / "cat.jpg"
    file.write_bytes(b"\xff\xd8\xff\xe0 a picture")
    with pytest.raises(InputError, match=r"cat.jpg' is not a checkpoint: neither a .safetensors file"):
        clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=trusted)


def test_plain_tensors_need_no_full_unpickling(tmp_path: Path) -> None:
    state = to_float32(original.VisionTransformer().state_dict())
    file = save_checkpoint(tmp_path / "a.pth", {"state_dict": state, "epoch": 3})
    assert not clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=True).used_pickle
    full_pickle = save_checkpoint(tmp_path / "b.pth", {"model": state, "args": argparse.Namespace(lr=0.1)})
    assert clearhead.convert_checkpoint(full_pickle, tmp_path / "other", "vit", trusted=True).used_pickle


def test_pickled_module_equals_original(tmp_path: Path) -> None:
    reference = original.spread(original.VisionTransformer()).float()
    model, result = convert_and_load(tmp_path, reference, "vit")
    assert result.used_pickle
    assert_same(model(make_images()).logits, reference.double()(make_images()))


def test_safetensors_need_no_trust(tmp_path: Path) -> None:
    save_file(to_float32(original.VisionTransformer().state_dict()), tmp_path / "a.safetensors")
    assert not clearhead.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "made", "vit").used_pickle


def list_files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"blocks.0.ls1.gamma": torch.ones(64), "norm_pre.bias": torch.ones(3)},
            "do not have: blocks.0.ls1.gamma, norm_p",
        ),
        ({"norm.weight": None}, "has no norm.weight: check --family"),
        ({"pos_embed": torch.ones(1, 8, 64)}, "do not form a square image"),
        (
            {"blocks.1.norm1.bias": torch.ones(3)},
            "the weights do not form a ViTForImageClassification: wrong shape: ",
        ),
        ({"blocks.1.norm1.bias": None}, "the weights do not form a ViTForImageClassification: missing"),
    ],
)
def test_unexpected_weights_raise_and_leave_no_files(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    state: dict[str, Any] = to_float32(original.VisionTransformer().state_dict()) | change
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    file = save_checkpoint(tmp_path / "a.pth", state)
    with pytest.raises(InputError) as raised:
        clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=True)
    assert message in str(raised.value)
    assert list_files(tmp_path) == ["a.pth"]


def test_invalid_arguments_raise(tmp_path: Path) -> None:
    state = to_float32(original.VisionTransformer().state_dict())
    file, dest = save_checkpoint(tmp_path / "a.pth", state), tmp_path / "made"
    with pytest.raises(InputError, match="unknown family 'vti': did you mean 'vit'"):
        clearhead.convert_checkpoint(file, dest, "vti", trusted=True)
    with pytest.raises(InputError, match="already exists"):
        clearhead.convert_checkpoint(file, tmp_path, "vit", trusted=True)
    with pytest.raises(InputError, match="there is no file"):
        clearhead.convert_checkpoint(tmp_path / "b.pth", dest, "vit", trusted=True)
    with pytest.raises(InputError, match="2 class names were given, but the model has 5 classes"):
        clearhead.convert_checkpoint(file, dest, "vit", trusted=True, class_names=["a", "b"])
    with pytest.raises(InputError, match="cannot open the tokenizer of"):
        clearhead.convert_checkpoint(file, dest, "vit", trusted=True, tokenizer=str(tmp_path / "nowhere"))
    (tmp_path / "torn.pth").write_bytes(file.read_bytes()[:1000])
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "number.pth").write_bytes(pickle.dumps(3))
    for name in ("torn", "text", "number"):
        with pytest.raises(InputError, match=r"cannot be opened|contains no named tensors|is not a checkpoint"):
            clearhead.convert_checkpoint(tmp_path / f"{name}.pth", dest, "vit", trusted=True)
    assert not dest.exists() and not list(tmp_path.glob(".*"))


def test_empty_output_folder_is_accepted(tmp_path: Path) -> None:
    file = save_checkpoint(tmp_path / "a.pth", to_float32(original.VisionTransformer().state_dict()))
    (tmp_path / "made").mkdir()
    clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=True)
    assert (tmp_path / "made" / "model.safetensors").is_file()


# --- the command line ---------------------------------------------------------------------------------------------


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    from clearhead.cli import main

    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code, out, err


def test_convert_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = save_checkpoint(tmp_path / "a.pth", to_float32(original.spread(original.VisionTransformer()).state_dict()))
    names = tmp_path / "labels.txt"
    names.write_text("\n".join(LABELS) + "\n")
    code, out, err = run_command(capsys, "convert", file, tmp_path / "made", "--family", "deit")
    assert code == 1 and out == "" and err.startswith("clearhead: ") and "--i-trust-this-file" in err
    common = ("--family", "deit", "--i-trust-this-file", "--class-names", names)
    code, out, _ = run_command(capsys, "convert", file, tmp_path / "made", *common)
    assert code == 0 and "ViTForImageClassification" in out and "heads 1" in out
    code, out, _ = run_command(capsys, "convert", file, tmp_path / "again", *common, "--json")
    assert code == 0 and json.loads(out)["schema"] == "clearhead/conversion"
    names.write_text(json.dumps(LABELS[:2]))
    code, _, err = run_command(capsys, "convert", file, tmp_path / "third", *common)
    assert code == 2 and "2 class names were given" in err and err.count("\n") == 1
    names.write_text("[")
    assert "are not a JSON list" in run_command(capsys, "convert", file, tmp_path / "third", *common)[2]
