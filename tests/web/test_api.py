"""The API: results stream in, cheapest first, in the form of `to_dict()`; every hostile input gets a clear message."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

import clearhead
from clearhead.probes import compute_attention_view
from clearhead.web import Limits
from clearhead.web.attention_cache import AttentionCache
from clearhead.web.explain_job import ExplainJob, run_explain_batch
from clearhead.web.image_upload import UploadedImage, decode_uploaded_image, parse_image_upload
from clearhead.web.model_registry import LoadedModel, ModelRegistry
from clearhead.web.openapi import _load_result_schema
from clearhead.web.scheduler import RequestJob
from clearhead.web.schemas import ExplainRequest, InputRequest, take_image_upload
from tests.render.test_view_model import attended
from tests.web.conftest import MODELS, events, in_base64, png

Make = Callable[..., TestClient]
TEXT = "You look extremely confused"


@pytest.fixture(scope="module")
def sentiment() -> clearhead.Explainer:
    """One of its own: those of the server are in use by its workers."""
    return clearhead.load("zoo:sentiment")


def test_results_stream_in_cheapest_first(client: httpx.Client, sentiment: clearhead.Explainer) -> None:
    methods = ["lime", "generic", "integrated-gradients", "rollout"]
    told = events(client, {"model": "zoo:sentiment", "text": TEXT, "methods": methods})
    kinds = [event["event"] for event in told]
    assert kinds[0] == "queued" and kinds[-1] == "done" and kinds.count("view") == 3
    found = {event["method"]: event["explanation"] for event in told if event["event"] == "explanation"}
    assert list(found) == ["rollout", "generic", "integrated-gradients", "lime"]
    for name, one in sentiment.explain(TEXT, method=methods).items():
        assert found[name]["units"]["names"] == list(one.units.names)
        np.testing.assert_allclose(found[name]["scores"], one.scores, atol=1e-5)
    agreement = [event["comparison"] for event in told if event["event"] == "comparison"][-1]
    assert agreement["methods"] == list(found) and len(agreement["agreement"]["values"]) == 4


def test_results_keep_to_the_schema_that_the_api_describes(client: httpx.Client) -> None:
    described = client.get("/api/openapi.json").json()
    form = {"components": described["components"], "$ref": "#/components/schemas/Explanation"}
    joint = {"components": described["components"], "$ref": "#/components/schemas/MultiStreamExplanation"}
    answer = client.post("/api/explanations", json={"model": "zoo:sentiment", "text": TEXT, "methods": ["attcat"]})
    jsonschema.Draft202012Validator(form).validate(answer.json()["explanations"]["attcat"])
    both = {"model": "zoo:pets-clip", "text": "a photo of a cat", "image": in_base64(png())}
    answer = client.post("/api/explanations", json=both)
    jsonschema.Draft202012Validator(joint).validate(answer.json()["explanations"]["generic"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(form).validate(answer.json()["explanations"]["generic"])
    assert "$id" not in _load_result_schema("explanation")


@pytest.mark.parametrize(
    ("ask", "target"),
    [
        ({"target": "NEGATIVE"}, "NEGATIVE"),
        ({"target": 0, "against": 1}, "NEGATIVE − POSITIVE"),
        ({"against": "POSITIVE"}, "NEGATIVE − POSITIVE"),
    ],
)
def test_targets_are_those_of_the_library(client: httpx.Client, ask: dict[str, Any], target: str) -> None:
    answer = client.post("/api/explanations", json={"model": "zoo:sentiment", "text": TEXT, **ask}).json()
    assert answer["explanations"]["generic"]["target"]["name"] == target


def test_a_prompt_a_picture_and_an_example_are_inputs_too(client: httpx.Client) -> None:
    word = client.post("/api/explanations", json={"model": "zoo:spell", "text": "phone", "place": "every"}).json()
    assert word["explanations"]["generic"]["parts"]["source"]["steps"][0] == "F"
    picture = client.post("/api/explanations", json={"model": "zoo:pets", "image": in_base64(png())}).json()
    assert picture["explanations"]["generic"]["units"]["grid"] == [12, 12]
    assert picture["picture"].startswith("data:image/png;base64,")
    ready = client.post("/api/explanations", json={"model": "zoo:shapes-detr", "example": 3}).json()
    assert "generic" in ready["explanations"]


def test_requests_of_equal_length_share_a_pass_and_get_their_own(sentiment: clearhead.Explainer) -> None:
    held = ModelRegistry({"zoo:sentiment": sentiment})["zoo:sentiment"]
    told: list[list[dict[str, Any]]] = []
    steps = []
    texts = {"so very boring": None, "I like movies": "NEGATIVE", "dull": None, "so very bored": "HAPPY"}
    for text, target in texts.items():
        told.append([])
        job = RequestJob("zoo:sentiment", told[-1].append, 60)
        ask = ExplainRequest(model="zoo:sentiment", text=text, target=target, methods=["generic", "attcat"])
        steps += ExplainJob(ask, held, None, job, Limits()).make_work_items()
    assert len({step.batch_key for step in steps}) == 1
    rows: list[int] = []
    original = sentiment.explain

    def counted(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(kwargs["inputs"]))
        return original(*args, **kwargs)

    sentiment.explain = counted  # type: ignore[method-assign]
    try:
        run_explain_batch(steps)
    finally:
        del sentiment.explain  # type: ignore[method-assign]
    # Three of one length fail together for the label of one, and are then run one by one; the short one goes alone.
    assert rows[0] == 3 and sorted(rows[1:]) == [1] * (len(rows) - 1)
    for (text, target), events_of in zip(texts.items(), told, strict=True):
        found = [event["explanation"] for event in events_of if event["event"] == "explanation"]
        if target == "HAPPY":
            problems = [event["message"] for event in events_of if event["event"] == "problem"]
            assert not found and all("unknown label 'HAPPY'" in message for message in problems) and problems
            continue
        assert [one["method"] for one in found] == ["attcat", "generic"]
        np.testing.assert_allclose(found[1]["scores"], sentiment.explain(text, target=target).scores, atol=1e-5)


def test_too_many_are_turned_away_with_a_hint(app: Make) -> None:
    answer = app(waiting=0).post("/api/explanations", json={"model": "zoo:sentiment", "text": TEXT})
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert "try again" in answer.json()["error"]


def test_what_takes_too_long_is_given_up_when_it_was_promised(app: Make) -> None:
    ask = {"model": "zoo:sentiment", "text": "one two three " * 30, "methods": ["kernel-shap"]}
    client = app(seconds=1.5)
    told = events(client, ask)  # type: ignore[arg-type]
    assert told[-1]["event"] == "expired" and "fewer or cheaper" in told[-1]["message"]


def test_a_request_can_be_cancelled_by_its_id(client: httpx.Client, address: str) -> None:
    assert client.delete("/api/jobs/nobody").status_code == 404
    ask = {"model": "zoo:sentiment", "text": "one two three " * 30, "methods": ["kernel-shap"]}
    with httpx.stream("POST", f"{address}/api/explain", json=ask, timeout=60) as answer:
        lines = answer.iter_lines()
        assert client.delete(f"/api/jobs/{json.loads(next(lines))['id']}").status_code == 200
        assert json.loads(list(lines)[-1]) == {"event": "cancelled"}


def giant_png(wide: int, high: int) -> bytes:
    """A picture of hardly any bytes and very many pixels."""
    header = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part)) for kind, part in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"text": "x" * 10_000_000}, "10,000,000 characters, and at most 20,000 are accepted"),
    ({"text": ""}, "the text is empty"),
    ({"text": " \n\t "}, "the text is empty"),
    ({"text": 5}, "text: Input should be a valid string"),
    ({"text": ["a"]}, "text: Input should be a valid string"),
    ({"text": None}, "give it a text"),
    ({"model": "/etc/passwd", "text": "x"}, "unknown model"),
    ({"model": "zoo:logic", "text": "x"}, "unknown model"),
    ({"model": "../zoo:sentiment", "text": "x"}, "unknown model"),
    ({"text": "x", "methods": []}, "methods: List should have at least 1 item"),
    ({"text": "x", "methods": ["__import__('os')"]}, "unknown method"),
    ({"text": "x", "methods": ["generic(layers=9)"]}, "unknown method"),
    ({"text": "x", "target": "nothing of the kind"}, "unknown label"),
    ({"text": "x", "target": 10**12}, "target"),
    ({"text": "x", "target": -5}, "label"),
    ({"text": "x", "target": {"a": 1}}, "target"),
    ({"text": "x", "place": 3}, "place"),
    ({"text": "x", "scale": "loud"}, "scale"),
    ({"text": "x", "path": "/etc/passwd"}, "path: Extra inputs are not permitted"),
    ({"text": "x", "image": in_base64(png())}, "not an image"),
    ({"text": "x", "example": 3}, "an example is a complete input"),
    ({"example": 3}, "no ready examples"),
    ({"model": "zoo:pets", "text": "/etc/hostname"}, "not text"),
    ({"model": "zoo:pets", "image": "/etc/hostname"}, "not in base64"),
    ({"model": "zoo:pets", "image": "file:///etc/hostname"}, "not in base64"),
    ({"model": "zoo:pets", "image": ""}, "the image cannot be opened"),
    ({"model": "zoo:pets", "image": in_base64(png()[:200])}, "the image cannot be opened"),
    ({"model": "zoo:pets", "image": in_base64(b"<svg onload=alert(1)>")}, "the image cannot be opened"),
    ({"model": "zoo:pets", "image": in_base64(giant_png(20_000, 20_000))}, "far more than the 24,000,000 pixels"),
    ({"model": "zoo:pets", "image": in_base64(giant_png(12_000, 12_000))}, "12,000 × 12,000 pixels"),
    ({"model": "zoo:pets", "image": in_base64(giant_png(2**31 - 1, 2**31 - 1))}, "image"),
    ({"model": "zoo:pets", "image": in_base64(giant_png(0, 0))}, "the image cannot be opened"),
    ({"model": "zoo:pets", "image": "A" * (13 * 2**20 * 4 // 3)}, "at most 12 MiB are accepted"),
]


@pytest.mark.parametrize(("ask", "message"), HOSTILE, ids=[str(i) for i in range(len(HOSTILE))])
def test_what_cannot_be_done_is_said_clearly(client: httpx.Client, ask: dict[str, Any], message: str) -> None:
    answer = client.post("/api/explanations", json={"model": "zoo:sentiment", **ask})
    assert answer.status_code == 422 and len(answer.text) < 1500
    assert message in answer.json()["error"]


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "\u202egnp.exe",
        "a\u200bb\u200d\ufeff",
        "a\x00b\x01\x7f",
        "💥" * 500,
        "x" * 19_000,
        "\u0430\u0301" * 99,
    ],
)
def test_odd_texts_are_texts(client: httpx.Client, text: str) -> None:
    answer = client.post("/api/explanations", json={"model": "zoo:sentiment", "text": text})
    assert answer.status_code == 200
    assert answer.json()["explanations"]["generic"]["units"]["texts"] == [text]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[" * 100_000, 400),
        (b'{"model": "zoo:sentiment", "text": "\\ud800"}', 422),
        (b'{"model": "zoo:sentiment", "text": "x", "target": NaN}', 422),
        (b'{"model": "zoo:sentiment", "text": "x", "max_new_tokens": 1e999}', 422),
        (b"\xff\xfe", 422),
    ],
)
def test_what_is_no_json_is_no_fault_of_the_server(client: httpx.Client, body: bytes, status: int) -> None:
    answer = client.post("/api/explanations", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status and answer.json()["error"]


def test_saved_results_are_opened_shown_and_shared(client: httpx.Client, tmp_path: Any) -> None:
    made = client.post("/api/explanations", json={"model": "zoo:pets", "image": in_base64(png())}).json()
    one = made["explanations"]["generic"]
    shown = {"explanations": [one], "pictures": [made["picture"]]}
    file = client.post("/api/share", json={**shown, "form": "safetensors"})
    assert "attachment" in file.headers["content-disposition"]
    (tmp_path / "why.safetensors").write_bytes(file.content)
    again = clearhead.load_explanation(tmp_path / "why.safetensors")
    assert again.to_dict() == one and again.image is not None
    for content in (
        file.content,
        json.dumps(one).encode(),
        json.dumps({"schema": "clearhead/shown", **shown}).encode(),
    ):
        opened = client.post("/api/open", content=content).json()
        assert opened["explanations"] == [one] and opened["view"]["schema"] == "clearhead/view"
    page = client.post("/api/share", json=shown)
    assert page.headers["content-type"].startswith("text/html") and b"Content-Security-Policy" in page.content
    assert client.post("/api/view", json=shown).json()["view"]["view"] == "input"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"{", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"[]", "between 1 and 24"),
        (b"{}", "not an explanation"),
        (b'{"schema": "clearhead/explanation", "version": 99}', "newer clearhead"),
        (b'{"schema": "clearhead/explanation", "version": 1, "units": 5}', "damaged"),
        (b'{"schema": "clearhead/shown", "explanations": 5}', "damaged"),
        (b"\x80\x04\x95cos\nsystem\n", "not an explanation"),
        (b"\xff" * 100, "not an explanation"),
        (struct.pack("<Q", 2**62) + b"{}", "not an explanation"),
    ],
)
def test_files_that_are_none_of_ours_are_refused(client: httpx.Client, content: bytes, message: str) -> None:
    answer = client.post("/api/open", content=content)
    assert answer.status_code == 422 and message in answer.json()["error"]
    assert "/tmp" not in answer.text  # nothing about this machine


def test_models_say_what_they_take_and_how_they_can_be_explained(client: httpx.Client) -> None:
    assert [line["name"] for line in client.get("/api/models").json()["models"]] == MODELS
    about = client.get("/api/model", params={"name": "zoo:sentiment", "tried": False}).json()
    assert about["takes"] == ["text"] and about["labels"] == ["NEGATIVE", "POSITIVE"]
    tried = client.get("/api/model", params={"name": "zoo:sentiment"}).json()["methods"]
    assert all(line["applies"] for line in tried) and tried[-1]["family"] == "control"
    assert client.get("/api/model", params={"name": "nope"}).status_code == 422


def test_heads_are_shown_whatever_the_model_takes(client: httpx.Client) -> None:
    seen = client.post("/api/attention", json={"model": "zoo:sentiment", "text": TEXT}).json()
    assert seen["view"]["view"] == "attention" and seen["heads"] is None
    both = {"model": "zoo:pets-clip", "text": "a cat", "image": in_base64(png())}
    seen = client.post("/api/attention", json=both).json()["view"]
    assert [own["name"] for own in seen["maps"]] == ["image", "text"]
    seen = client.post("/api/attention", json={"model": "zoo:spell", "text": "phone"}).json()["view"]
    assert [own["name"] for own in seen["maps"]] == ["source", "prefix", "prefix → source"]
    cross = seen["maps"][2]
    assert cross["keys"] == [*"phone", "</s>"] and cross["tokens"][0] == "</s>" and cross["row"] is None
    found = client.post("/api/attention", json={"model": "zoo:shapes-detr", "example": 3}).json()["view"]
    assert "queries → image" in [own["name"] for own in found["maps"]]


LONG = "a gripping film but the ending is dull " * 22


def test_heads_of_a_long_text_are_fetched_one_by_one(client: httpx.Client, sentiment: clearhead.Explainer) -> None:
    seen = client.post("/api/attention", json={"model": "zoo:sentiment", "text": LONG}).json()
    n = len(seen["view"]["tokens"])
    assert n > 150 and seen["view"]["size"][0] < n
    whole = client.get(f"/api/heads/{seen['heads']}", params={"layer": 2, "head": 5})
    assert whole.headers["content-type"] == "application/octet-stream" and len(whole.content) == n * n
    expected = compute_attention_view(sentiment, LONG).get_map(2, 5)
    got = (np.frombuffer(whole.content, np.uint8).reshape(n, n) / 255) ** 2
    assert np.abs(np.sqrt(got) - np.sqrt(expected)).max() <= 0.5 / 255 + 1e-6
    for key, params, status in (
        ("nobody", {"layer": 0, "head": 0}, 404),
        (seen["heads"], {"layer": 6, "head": 0}, 404),
        (seen["heads"], {"layer": 0, "head": 0, "name": "other"}, 404),
        (seen["heads"], {"layer": -1, "head": 0}, 422),
        (seen["heads"], {"layer": "x", "head": 0}, 422),
    ):
        answer = client.get(f"/api/heads/{key}", params=params)
        assert answer.status_code == status and answer.json()["error"]


def test_maps_that_were_not_asked_for_make_room() -> None:
    heads = AttentionCache(max_bytes=3 * 2 * 3 * 10 * 10)
    keys = [heads.add({"": attended(10)}) for _ in range(3)]
    assert len(heads.get_head_map(keys[0], "", 1, 2)) == 100
    heads.add({"": attended(10)})
    assert len(heads.get_head_map(keys[0], "", 0, 0)) == 100  # it was asked for last
    with pytest.raises(KeyError):
        heads.get_head_map(keys[1], "", 0, 0)
    assert heads.cache_and_build_view(attended(400, 2, 4))["heads"] is None  # too large to be kept: summarised


def test_no_picture_is_decoded_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    convert = Image.Image.convert
    monkeypatch.setattr(Image.Image, "convert", lambda *a, **k: decoded.append("") or convert(*a, **k))
    file = parse_image_upload(in_base64(png(30, 20)), Limits())
    assert file.num_pixels == 600 and decoded == []
    assert decode_uploaded_image(file, Limits()).size == (30, 20) and decoded != []
    ask = InputRequest(model="zoo:pets", image=in_base64(png()))
    assert (
        take_image_upload(ask, Limits()) is not None and ask.image is None
    )  # nobody waits with the text of it in memory


def test_a_picture_that_breaks_off_is_told_when_its_turn_has_come(client: httpx.Client) -> None:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png(200, 200))).save(buffer, "JPEG")
    ask = {"model": "zoo:pets", "image": in_base64(buffer.getvalue()[: len(buffer.getvalue()) // 2])}
    told = events(client, ask)
    assert [one["message"] for one in told if one["event"] == "problem"] == [
        "the image cannot be opened (damaged): send a PNG, JPEG, WebP, GIF or BMP"
    ]
    for path in ("/api/explanations", "/api/attention"):
        answer = client.post(path, json=ask)
        assert answer.status_code == 422 and "damaged" in answer.json()["error"]


def test_a_picture_with_more_than_eight_bits_is_refused_and_not_made_white(client: httpx.Client) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.full((64, 64), 257 * 100, dtype=np.uint16)).save(buffer, "PNG")
    answer = client.post("/api/explanations", json={"model": "zoo:pets", "image": in_base64(buffer.getvalue())})
    assert answer.status_code == 422 and "save it with 8 bits a channel" in answer.json()["error"]


def test_large_pictures_share_no_pass(explainers: dict[str, clearhead.Explainer]) -> None:
    held, job = LoadedModel("zoo:pets", explainers["zoo:pets"]), RequestJob("zoo:pets", lambda event: None, 1.0)
    asked = {
        size: ExplainJob(ExplainRequest(model="zoo:pets"), held, UploadedImage(b"", size), job, Limits())
        .make_work_items()[0]
        .batch_key
        for size in (1000, 20_000_000)
    }
    assert asked[1000] is not None and asked[20_000_000] is None


def test_why_one_word_and_not_another(client: httpx.Client) -> None:
    ask = {"model": "zoo:spell", "text": "phone", "target": "F", "against": "V"}
    (found,) = client.post("/api/explanations", json=ask).json()["explanations"].values()
    told = next(iter(found["parts"].values()))["target"] if "parts" in found else found["target"]
    assert told["kind"] == "contrast" and told["name"] == "F − V" and told["against"] == "V"
