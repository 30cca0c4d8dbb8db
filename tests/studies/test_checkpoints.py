"""Original checkpoints become models of transformers that answer the same; what is not understood is said, not lost."""

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


def picture(size: int = 12) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, size, size, dtype=torch.float64)


def kept(path: Path, weights: Any) -> Path:
    torch.save(weights, path)
    return path


def single(state: Any) -> dict[str, Tensor]:
    """As files have it; tests compare in float64, so nothing but these numbers may differ."""
    return {name: part.float() for name, part in state.items()}


def rounded(model: Any) -> Any:
    """The original with its weights as a file of float32 has them."""
    return model.float().double()


def converted(tmp_path: Path, weights: Any, family: str, **how: Any) -> tuple[Any, clearhead.ConversionResult]:
    done = clearhead.convert_checkpoint(
        kept(tmp_path / "original.pth", weights), tmp_path / "made", family, trusted=True, **how
    )
    opener = getattr(transformers, done.architecture)
    return opener.from_pretrained(tmp_path / "made", use_safetensors=True).double().eval(), done


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).detach().abs().max() / wanted.detach().abs().max()) < 1e-6


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
def test_timm_names(tmp_path: Path, family: str, pool: str, architecture: str, wrapped: str) -> None:
    twin = rounded(original.spread(original.VisionTransformer(pool)))
    state = single(twin.state_dict())
    weights: Any = {"plain": state, "model": {"model": state, "epoch": 3}}.get(wrapped)
    weights = weights or {"state_dict": {f"module.{name}": part for name, part in state.items()}}
    model, done = converted(tmp_path, weights, family, labels=LABELS)
    assert done.architecture == architecture and done.assumed == {"heads": 1} and not done.left_out
    assert_same(model(picture()).logits, twin(picture()))
    assert model.config.id2label == dict(enumerate(LABELS)) and model.config.image_size == 12


@pytest.mark.parametrize("pool", ["token", "dist", "avg"])
def test_a_converted_model_is_explained(tmp_path: Path, pool: str) -> None:
    if pool == "avg":
        models.skip_if_not_yet("beit")  # which a mean over patches becomes
    weights = single(original.spread(original.VisionTransformer(pool)).state_dict())
    converted(tmp_path, weights, "deit", labels=LABELS)
    e = clearhead.load(str(tmp_path / "made")).explain((picture(20)[0].permute(1, 2, 0) * 60 + 120).byte().numpy())
    assert e.units.grid == (3, 3) and e.prediction["label"] in LABELS and e.scores.max() > 0


def test_how_pictures_are_prepared(tmp_path: Path) -> None:
    weights = single(original.spread(original.VisionTransformer()).state_dict())
    half = clearhead.convert_checkpoint(kept(tmp_path / "a.pth", weights), tmp_path / "vit", "vit", trusted=True)
    clearhead.convert_checkpoint(tmp_path / "a.pth", tmp_path / "deit", "deit", trusted=True)
    said = [json.loads((tmp_path / name / "preprocessor_config.json").read_text()) for name in ("vit", "deit")]
    assert said[0]["image_mean"] == [0.5] * 3 and said[0]["size"] == {"height": 12, "width": 12}
    assert said[1]["image_mean"] == [0.485, 0.456, 0.406] and said[1]["crop_size"] == {"height": 12, "width": 12}
    assert said[1]["size"] == {"shortest_edge": 14}
    assert half.to_dict()["architecture"] == "ViTForImageClassification"


def test_heads_and_biases(tmp_path: Path) -> None:
    twin = rounded(original.spread(original.VisionTransformer(heads=4, bias=False)))
    model, done = converted(tmp_path, single(twin.state_dict()), "vit", heads=4)
    assert_same(model(picture()).logits, twin(picture()))
    assert done.assumed == {"heads": 4} and model.config.qkv_bias is False
    with pytest.raises(InputError, match="pass heads="):
        clearhead.convert_checkpoint(tmp_path / "original.pth", tmp_path / "other", "vit", trusted=True, heads=7)


def test_dino(tmp_path: Path) -> None:
    """A training checkpoint holds student and teacher; the linear classifier is a file of its own."""
    twin = rounded(original.spread(original.VisionTransformer(None)))
    state = single(twin.state_dict())
    teacher = {f"backbone.{name}": part for name, part in state.items()}
    full = {
        "student": {f"module.{name}": torch.zeros_like(part) for name, part in teacher.items()},
        "teacher": teacher | {"head.mlp.0.weight": torch.ones(3, 3), "head.last_layer.weight_v": torch.ones(3, 3)},
    }
    model, done = converted(tmp_path, full, "dino")
    assert done.architecture == "ViTModel" and set(done.left_out) == {"head.last_layer.weight_v", "head.mlp.0.weight"}
    assert_same(model(picture()).last_hidden_state, twin(picture()))
    linear = original.spread(nn.Linear(2 * original.WIDE, 5)).float()
    head = {"state_dict": {f"module.linear.{name}": part for name, part in linear.state_dict().items()}}
    done = clearhead.convert_checkpoint(
        kept(tmp_path / "backbone.pth", state),
        tmp_path / "classifier",
        "dino",
        trusted=True,
        head=kept(tmp_path / "linear.pth", head),
        labels=LABELS,
    )
    assert done.architecture == "Dinov2ForImageClassification"
    whole = transformers.Dinov2ForImageClassification.from_pretrained(tmp_path / "classifier").double().eval()
    assert_same(whole(picture()).logits, linear.double()(original.dino_features(twin, picture())))
    e = clearhead.load(whole).explain({"pixel_values": picture()[:1]})
    assert e.certificate["readout"] == "first + patches" and e.certificate["readout_checked"]


def test_a_classifier_that_reads_several_layers_is_refused(tmp_path: Path) -> None:
    state = single(original.VisionTransformer(None).state_dict())
    head = kept(tmp_path / "linear.pth", {"linear.weight": torch.ones(5, 4 * 64), "linear.bias": torch.ones(5)})
    with pytest.raises(InputError, match="input is 4 times the width"):
        clearhead.convert_checkpoint(
            kept(tmp_path / "a.pth", state), tmp_path / "made", "dino", trusted=True, head=head
        )


def test_moco(tmp_path: Path) -> None:
    twin = rounded(original.spread(original.VisionTransformer(None)))
    state = single(twin.state_dict())
    pretrained = {
        "state_dict": {
            **{f"module.base_encoder.{name}": part for name, part in state.items()},
            **{f"module.momentum_encoder.{name}": part + 1 for name, part in state.items()},
            **{"module.base_encoder.head.0.weight": torch.ones(2, 2), "module.predictor.0.weight": torch.ones(2, 2)},
        }
    }
    model, done = converted(tmp_path, pretrained, "moco")
    assert done.architecture == "ViTModel" and "head.0.weight" in done.left_out
    assert_same(model(picture()).last_hidden_state, twin(picture()))
    probe = rounded(original.spread(original.VisionTransformer("token")))
    state = {f"module.{name}": part for name, part in single(probe.state_dict()).items()}
    clearhead.convert_checkpoint(
        kept(tmp_path / "b.tar", {"state_dict": state}), tmp_path / "probe", "moco", trusted=True
    )
    again = transformers.ViTForImageClassification.from_pretrained(tmp_path / "probe").double().eval()
    assert_same(again(picture()).logits, probe(picture()))


def test_the_small_model_of_moco_has_narrower_heads() -> None:
    from clearhead.studies.checkpoints.reader import ConversionSettings
    from clearhead.studies.checkpoints.vit import _HEADS_BY_FAMILY_AND_WIDTH, _HEADS_BY_WIDTH

    assert ConversionSettings("moco").get_num_heads(384, _HEADS_BY_FAMILY_AND_WIDTH["moco"]) == 12
    assert ConversionSettings("dino").get_num_heads(384, _HEADS_BY_WIDTH) == 6
    assert ConversionSettings("mae").get_num_heads(1280, _HEADS_BY_WIDTH) == 16


def test_the_encoder_of_mae(tmp_path: Path) -> None:
    twin = rounded(original.spread(original.VisionTransformer(None)))
    state = single(twin.state_dict()) | {
        "mask_token": torch.ones(1, 1, 8),
        "decoder_blocks.0.norm1.bias": torch.ones(8),
    }
    model, done = converted(tmp_path, {"model": state}, "mae")
    assert done.architecture == "ViTModel" and len(done.left_out) == 2
    assert_same(model(picture()).last_hidden_state, twin(picture()))


# --- the other families -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scripted", [False, True])
def test_clip(tmp_path: Path, scripted: bool) -> None:
    twin = rounded(original.spread(original.CLIP()))
    text = torch.tensor([[28, 3, 9, 29, 0, 0, 0], [28, 5, 29, 0, 0, 0, 0]])
    path = tmp_path / "original.pt"
    if scripted:  # OpenAI's own files are archives of TorchScript
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is old, and fixes what it saw
            torch.jit.trace(twin.float(), (picture().float(), text), check_trace=False).save(str(path))
        twin = twin.double()
    else:
        sizes = {
            "input_resolution": torch.tensor(12),
            "context_length": torch.tensor(7),
            "vocab_size": torch.tensor(30),
        }
        torch.save(single(twin.state_dict()) | sizes, path)
    done = clearhead.convert_checkpoint(path, tmp_path / "made", "clip", trusted=True)
    assert done.assumed == {"heads": {"text": 2, "picture": 2}} and done.wants == "a tokenizer"
    assert done.unpickled is scripted
    model = transformers.CLIPModel.from_pretrained(tmp_path / "made").double().eval()
    output = model(input_ids=text, pixel_values=picture(), attention_mask=torch.ones_like(text))
    assert_same(output.logits_per_image, twin(picture(), text))
    inputs = {"input_ids": text[:1, :4], "pixel_values": picture()[:1]}
    assert clearhead.load(model).explain(inputs)["image"].scores.shape == (10,)


def test_half_precision_is_widened(tmp_path: Path) -> None:
    state = {name: part.half() for name, part in original.spread(original.CLIP()).state_dict().items()}
    clearhead.convert_checkpoint(kept(tmp_path / "a.pt", state), tmp_path / "made", "clip", trusted=True)
    assert {part.dtype for part in load_file(tmp_path / "made" / "model.safetensors").values()} == {torch.float32}


def test_clip_with_a_resnet_is_refused(tmp_path: Path) -> None:
    weights = {"visual.layer1.0.conv1.weight": torch.ones(1)}
    with pytest.raises(UnsupportedError, match="ResNet image encoder"):
        clearhead.convert_checkpoint(kept(tmp_path / "a.pt", weights), tmp_path / "made", "clip", trusted=True)


@pytest.mark.parametrize("kind", ["bottleneck", "basic"])
def test_detr(tmp_path: Path, kind: str) -> None:
    resnet: Any = transformers.ResNetConfig
    backbone = resnet(
        embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[2, 1, 1, 2], layer_type=kind, out_features=["stage4"]
    )
    sizes: dict[str, Any] = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 8, f"{part}_ffn_dim": 24}
    sizes |= {"d_model": 32, "num_queries": 5, "num_labels": 4}
    config = transformers.DetrConfig(backbone_config=backbone, **sizes)
    twin: Any = original.spread(transformers.DetrForObjectDetection(config)).float()
    twin.save_pretrained(tmp_path / "twin")
    state = original.original_detr(load_file(tmp_path / "twin" / "model.safetensors"))
    assert {"transformer.encoder.layers.1.self_attn.in_proj_weight", "backbone.0.body.layer4.1.bn1.weight"} <= set(
        state
    )
    assert not any(name.startswith("model.") for name in state)
    model, done = converted(tmp_path, {"model": state}, "detr", labels=LABELS[:4])
    assert done.architecture == "DetrForObjectDetection" and done.assumed["heads"] == 8
    pixels = picture(64)
    wanted, found = twin.double()(pixels), model(pixels)
    assert_same(found.logits, wanted.logits)
    assert_same(found.pred_boxes, wanted.pred_boxes)
    assert model.config.id2label[3] == "dog"


@pytest.mark.parametrize("wrapped", ["plain", "module.", "model.", "gamma"])
def test_bert(tmp_path: Path, wrapped: str) -> None:
    twin, tok = text_model("bert", dtype=torch.float32)
    twin.save_pretrained(tmp_path / "twin")
    tok.save_pretrained(tmp_path / "tokenizer")
    state = load_file(tmp_path / "twin" / "model.safetensors")
    state["bert.embeddings.position_ids"] = torch.arange(70)[None]
    if wrapped == "gamma":
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, ending in old.items():
            state = {name.replace(new, ending): part for name, part in state.items()}
    elif wrapped != "plain":
        state = {f"{wrapped}{name}": part for name, part in state.items()}
    model, done = converted(tmp_path, state, "bert", heads=4, labels=LABELS[:3], tokenizer=str(tmp_path / "tokenizer"))
    assert done.architecture == "BertForSequenceClassification" and done.wants is None
    inputs = tok("I like the movie.", return_tensors="pt")
    assert_same(model(**inputs).logits, twin.double()(**inputs).logits)
    e = clearhead.load(str(tmp_path / "made")).explain("I like the movie.")
    assert e.prediction["label"] in LABELS[:3]


@pytest.mark.parametrize(("head", "architecture"), [("Model", "BertModel"), ("ForMaskedLM", "BertForMaskedLM")])
def test_bert_with_other_heads(tmp_path: Path, head: str, architecture: str) -> None:
    twin, tok = text_model("bert", head, dtype=torch.float32)
    twin.save_pretrained(tmp_path / "twin")
    state = load_file(tmp_path / "twin" / "model.safetensors")
    if head == "ForMaskedLM":
        state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"].clone()
        state["cls.seq_relationship.weight"] = torch.ones(2, 32)
    else:
        state = {f"bert.{name}": part for name, part in state.items()}
    model, done = converted(tmp_path, state, "bert", heads=4)
    assert done.architecture == architecture
    inputs = tok("I like the movie.", return_tensors="pt")
    assert_same(model(**inputs)[0], twin.double()(**inputs)[0])
    with pytest.raises(InputError, match="the file has no classifier"):
        clearhead.convert_checkpoint(
            tmp_path / "original.pth", tmp_path / "b", "bert", trusted=True, heads=4, labels=["a"]
        )


# --- files --------------------------------------------------------------------------------------------------------


class Harm:
    """What a pickled file can do: opening it runs this."""

    def __reduce__(self) -> Any:
        return exec, ("import pathlib, os; pathlib.Path(os.environ['HARM']).write_text('done')",)


def test_a_pickled_file_is_not_opened_unless_it_is_vouched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "harm"
    monkeypatch.setenv("HARM", str(mark))
    state = single(original.VisionTransformer().state_dict())
    file = kept(tmp_path / "a.pth", {"model": state, "harm": Harm()})
    with pytest.raises(UnsupportedError, match=r"can execute arbitrary code .* --i-trust-this-file"):
        clearhead.convert_checkpoint(file, tmp_path / "made", "vit")
    assert not mark.exists() and not (tmp_path / "made").exists()
    done = clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=True)
    assert done.unpickled and mark.exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_what_is_no_checkpoint_is_not_called_one(tmp_path: Path, trusted: bool) -> None:
    file = tmp_path / "cat.jpg"
    file.write_bytes(b"\xff\xd8\xff\xe0 a picture")
    with pytest.raises(InputError, match=r"cat.jpg' is not a checkpoint: neither a .safetensors file"):
        clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=trusted)


def test_plain_tensors_are_not_unpickled_in_full(tmp_path: Path) -> None:
    state = single(original.VisionTransformer().state_dict())
    file = kept(tmp_path / "a.pth", {"state_dict": state, "epoch": 3})
    assert not clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=True).unpickled
    whole = kept(tmp_path / "b.pth", {"model": state, "args": argparse.Namespace(lr=0.1)})
    assert clearhead.convert_checkpoint(whole, tmp_path / "other", "vit", trusted=True).unpickled


def test_a_whole_module_in_a_file(tmp_path: Path) -> None:
    twin = original.spread(original.VisionTransformer()).float()
    model, done = converted(tmp_path, twin, "vit")
    assert done.unpickled
    assert_same(model(picture()).logits, twin.double()(picture()))


def test_safetensors_need_no_trust(tmp_path: Path) -> None:
    save_file(single(original.VisionTransformer().state_dict()), tmp_path / "a.safetensors")
    assert not clearhead.convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "made", "vit").unpickled


def left_behind(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"blocks.0.ls1.gamma": torch.ones(64), "norm_pre.bias": torch.ones(3)},
            "do not have: blocks.0.ls1.gamma, norm_p",
        ),
        ({"norm.weight": None}, "has no norm.weight: is it of another family?"),
        ({"pos_embed": torch.ones(1, 8, 64)}, "do not form a square image"),
        (
            {"blocks.1.norm1.bias": torch.ones(3)},
            "the weights do not form a ViTForImageClassification: wrong shape: ",
        ),
        ({"blocks.1.norm1.bias": None}, "the weights do not form a ViTForImageClassification: missing"),
    ],
)
def test_what_is_not_understood_is_said_and_nothing_is_left_behind(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    state: dict[str, Any] = single(original.VisionTransformer().state_dict()) | change
    state = {name: part for name, part in state.items() if part is not None}
    file = kept(tmp_path / "a.pth", state)
    with pytest.raises(InputError) as refused:
        clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=True)
    assert said in str(refused.value)
    assert left_behind(tmp_path) == ["a.pth"]


def test_bad_arguments(tmp_path: Path) -> None:
    state = single(original.VisionTransformer().state_dict())
    file, dest = kept(tmp_path / "a.pth", state), tmp_path / "made"
    with pytest.raises(InputError, match="unknown family 'vti': did you mean 'vit'"):
        clearhead.convert_checkpoint(file, dest, "vti", trusted=True)
    with pytest.raises(InputError, match="already exists"):
        clearhead.convert_checkpoint(file, tmp_path, "vit", trusted=True)
    with pytest.raises(InputError, match="there is no file"):
        clearhead.convert_checkpoint(tmp_path / "b.pth", dest, "vit", trusted=True)
    with pytest.raises(InputError, match="2 labels were given, but the model has 5 classes"):
        clearhead.convert_checkpoint(file, dest, "vit", trusted=True, labels=["a", "b"])
    with pytest.raises(InputError, match="cannot open the tokenizer of"):
        clearhead.convert_checkpoint(file, dest, "vit", trusted=True, tokenizer=str(tmp_path / "nowhere"))
    (tmp_path / "torn.pth").write_bytes(file.read_bytes()[:1000])
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "number.pth").write_bytes(pickle.dumps(3))
    for name in ("torn", "text", "number"):
        with pytest.raises(InputError, match=r"cannot be opened|contains no named tensors|is not a checkpoint"):
            clearhead.convert_checkpoint(tmp_path / f"{name}.pth", dest, "vit", trusted=True)
    assert not dest.exists() and not list(tmp_path.glob(".*"))


def test_an_empty_folder_may_be_there(tmp_path: Path) -> None:
    file = kept(tmp_path / "a.pth", single(original.VisionTransformer().state_dict()))
    (tmp_path / "made").mkdir()
    clearhead.convert_checkpoint(file, tmp_path / "made", "vit", trusted=True)
    assert (tmp_path / "made" / "model.safetensors").is_file()


# --- the command line ---------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    from clearhead.cli import main

    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = kept(tmp_path / "a.pth", single(original.spread(original.VisionTransformer()).state_dict()))
    names = tmp_path / "labels.txt"
    names.write_text("\n".join(LABELS) + "\n")
    code, out, err = said(capsys, "convert", file, tmp_path / "made", "--family", "deit")
    assert code == 1 and out == "" and err.startswith("clearhead: ") and "--i-trust-this-file" in err
    common = ("--family", "deit", "--i-trust-this-file", "--class-names", names)
    code, out, _ = said(capsys, "convert", file, tmp_path / "made", *common)
    assert code == 0 and "ViTForImageClassification" in out and "heads 1" in out
    code, out, _ = said(capsys, "convert", file, tmp_path / "again", *common, "--json")
    assert code == 0 and json.loads(out)["schema"] == "clearhead/conversion"
    names.write_text(json.dumps(LABELS[:2]))
    code, _, err = said(capsys, "convert", file, tmp_path / "third", *common)
    assert code == 2 and "2 labels were given" in err and err.count("\n") == 1
    names.write_text("[")
    assert "are not a JSON list" in said(capsys, "convert", file, tmp_path / "third", *common)[2]
