"""The API: results stream in cheapest first, as `to_dict()` gives them; every invalid input gets a clear error."""

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
from tests.render.test_view_model import make_attention_view
from tests.web.conftest import MODELS, encode_base64, make_png, stream_events

MakeClient = Callable[..., TestClient]
TEXT = "You look extremely confused"


@pytest.fixture(scope="module")
def sentiment() -> clearhead.Explainer:
    """A separate explainer: those of the server are in use by its workers."""
    return clearhead.load("zoo:sentiment")


def test_results_stream_in_cheapest_first(client: httpx.Client, sentiment: clearhead.Explainer) -> None:
    methods = ["lime", "generic", "integrated-gradients", "rollout"]
    received = stream_events(client, {"model": "zoo:sentiment", "text": TEXT, "methods": methods})
    kinds = [event["event"] for event in received]
    assert kinds[0] == "queued" and kinds[-1] == "done" and kinds.count("view") == 3
    documents = {event["method"]: event["explanation"] for event in received if event["event"] == "explanation"}
    assert list(documents) == ["rollout", "generic", "integrated-gradients", "lime"]
    for name, explanation in sentiment.explain(TEXT, method=methods).items():
        assert documents[name]["units"]["names"] == list(explanation.units.names)
        np.testing.assert_allclose(documents[name]["scores"], explanation.scores, atol=1e-5)
    agreement = [event["comparison"] for event in received if event["event"] == "comparison"][-1]
    assert agreement["methods"] == list(documents) and len(agreement["agreement"]["values"]) == 4


def test_results_match_the_openapi_schema(client: httpx.Client) -> None:
    openapi = client.get("/api/openapi.json").json()
    single_schema = {"components": openapi["components"], "$ref": "#/components/schemas/Explanation"}
    multi_stream_schema = {"components": openapi["components"], "$ref": "#/components/schemas/MultiStreamExplanation"}
    response = client.post("/api/explanations", json={"model": "zoo:sentiment", "text": TEXT, "methods": ["attcat"]})
    jsonschema.Draft202012Validator(single_schema).validate(response.json()["explanations"]["attcat"])
    both = {"model": "zoo:pets-clip", "text": "a photo of a cat", "image": encode_base64(make_png())}
    response = client.post("/api/explanations", json=both)
    jsonschema.Draft202012Validator(multi_stream_schema).validate(response.json()["explanations"]["ensemble"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(single_schema).validate(response.json()["explanations"]["ensemble"])
    assert "$id" not in _load_result_schema("explanation")


@pytest.mark.parametrize(
    ("body", "target"),
    [
        ({"target": "NEGATIVE"}, "NEGATIVE"),
        ({"target": 0, "against": 1}, "NEGATIVE − POSITIVE"),
        ({"against": "POSITIVE"}, "NEGATIVE − POSITIVE"),
    ],
)
def test_targets_equal_those_of_the_library(client: httpx.Client, body: dict[str, Any], target: str) -> None:
    response = client.post("/api/explanations", json={"model": "zoo:sentiment", "text": TEXT, **body}).json()
    assert response["explanations"]["ensemble"]["target"]["name"] == target


def test_prompt_image_and_example_inputs_are_explained(client: httpx.Client) -> None:
    word = client.post("/api/explanations", json={"model": "zoo:spell", "text": "phone", "position": "every"}).json()
    assert word["explanations"]["ensemble"]["by_stream"]["source"]["steps"][0] == "F"
    image = client.post("/api/explanations", json={"model": "zoo:pets", "image": encode_base64(make_png())}).json()
    assert image["explanations"]["ensemble"]["units"]["grid"] == [12, 12]
    assert image["image"].startswith("data:image/png;base64,")
    example = client.post("/api/explanations", json={"model": "zoo:shapes-detr", "example": 3}).json()
    assert "ensemble" in example["explanations"]


def test_equal_length_requests_share_a_pass_and_get_their_own_results(sentiment: clearhead.Explainer) -> None:
    model = ModelRegistry({"zoo:sentiment": sentiment})["zoo:sentiment"]
    received: list[list[dict[str, Any]]] = []
    steps = []
    texts = {"so very boring": None, "I like movies": "NEGATIVE", "dull": None, "so very bored": "HAPPY"}
    for text, target in texts.items():
        received.append([])
        job = RequestJob("zoo:sentiment", received[-1].append, 60)
        body = ExplainRequest(model="zoo:sentiment", text=text, target=target, methods=["generic", "attcat"])
        steps += ExplainJob(body, model, None, job, Limits()).make_work_items()
    assert len({step.batch_key for step in steps}) == 1
    batch_sizes: list[int] = []
    original = sentiment.explain

    def count_inputs(*args: Any, **kwargs: Any) -> Any:
        batch_sizes.append(len(kwargs["inputs"]))
        return original(*args, **kwargs)

    sentiment.explain = count_inputs  # type: ignore[method-assign]
    try:
        run_explain_batch(steps)
    finally:
        del sentiment.explain  # type: ignore[method-assign]
    # Three of equal length fail together because of one label, and are then run one by one; the short one runs alone.
    assert batch_sizes[0] == 3 and sorted(batch_sizes[1:]) == [1] * (len(batch_sizes) - 1)
    for (text, target), request_events in zip(texts.items(), received, strict=True):
        documents = [event["explanation"] for event in request_events if event["event"] == "explanation"]
        if target == "HAPPY":
            problems = [event["message"] for event in request_events if event["event"] == "error"]
            assert not documents and all("unknown label 'HAPPY'" in message for message in problems) and problems
            continue
        assert [document["method"] for document in documents] == ["attcat", "generic"]
        np.testing.assert_allclose(
            documents[1]["scores"], sentiment.explain(text, "generic", target=target).scores, atol=1e-5
        )


def test_full_queue_returns_429_with_retry_after(app: MakeClient) -> None:
    response = app(max_pending_requests=0).post("/api/explanations", json={"model": "zoo:sentiment", "text": TEXT})
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
    assert "try again" in response.json()["error"]


def test_request_expires_at_its_time_limit(app: MakeClient) -> None:
    body = {"model": "zoo:sentiment", "text": "one two three " * 30, "methods": ["kernel-shap"]}
    client = app(timeout_seconds=1.5)
    received = stream_events(client, body)  # type: ignore[arg-type]
    assert received[-1]["event"] == "expired" and "fewer or cheaper" in received[-1]["message"]


def test_request_is_cancelled_by_id(client: httpx.Client, address: str) -> None:
    assert client.delete("/api/jobs/unknown").status_code == 404
    body = {"model": "zoo:sentiment", "text": "one two three " * 30, "methods": ["kernel-shap"]}
    with httpx.stream("POST", f"{address}/api/explain", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert client.delete(f"/api/jobs/{json.loads(next(lines))['id']}").status_code == 200
        assert json.loads(list(lines)[-1]) == {"event": "cancelled"}


def make_giant_png(width: int, height: int) -> bytes:
    """Make a PNG with few bytes and very many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


INVALID_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"text": "x" * 10_000_000}, "10,000,000 characters, but at most 20,000 are accepted"),
    ({"text": ""}, "the text is empty"),
    ({"text": " \n\t "}, "the text is empty"),
    ({"text": 5}, "text: Input should be a valid string"),
    ({"text": ["a"]}, "text: Input should be a valid string"),
    ({"text": None}, "provide a text"),
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
    ({"text": "x", "position": 3}, "makes one prediction per input"),
    ({"text": "x", "scale": "loud"}, "scale"),
    ({"text": "x", "path": "/etc/passwd"}, "path: Extra inputs are not permitted"),
    ({"text": "x", "image": encode_base64(make_png())}, "not an image"),
    ({"text": "x", "example": 3}, "an example is a complete input"),
    ({"example": 3}, "no built-in examples"),
    ({"model": "zoo:pets", "text": "/etc/hostname"}, "not text"),
    ({"model": "zoo:pets", "image": "/etc/hostname"}, "not encoded in base64"),
    ({"model": "zoo:pets", "image": "file:///etc/hostname"}, "not encoded in base64"),
    ({"model": "zoo:pets", "image": ""}, "the image cannot be opened"),
    ({"model": "zoo:pets", "image": encode_base64(make_png()[:200])}, "the image cannot be opened"),
    ({"model": "zoo:pets", "image": encode_base64(b"<svg onload=alert(1)>")}, "the image cannot be opened"),
    (
        {"model": "zoo:pets", "image": encode_base64(make_giant_png(20_000, 20_000))},
        "far more than the 24,000,000 pixels",
    ),
    ({"model": "zoo:pets", "image": encode_base64(make_giant_png(12_000, 12_000))}, "12,000 × 12,000 pixels"),
    ({"model": "zoo:pets", "image": encode_base64(make_giant_png(2**31 - 1, 2**31 - 1))}, "image"),
    ({"model": "zoo:pets", "image": encode_base64(make_giant_png(0, 0))}, "the image cannot be opened"),
    ({"model": "zoo:pets", "image": "A" * (13 * 2**20 * 4 // 3)}, "at most 12 MiB are accepted"),
]


@pytest.mark.parametrize(("body", "message"), INVALID_REQUESTS, ids=[str(i) for i in range(len(INVALID_REQUESTS))])
def test_invalid_requests_return_422_with_a_message(client: httpx.Client, body: dict[str, Any], message: str) -> None:
    response = client.post("/api/explanations", json={"model": "zoo:sentiment", **body})
    assert response.status_code == 422 and len(response.text) < 1500
    assert message in response.json()["error"]


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
def test_unusual_texts_are_explained(client: httpx.Client, text: str) -> None:
    response = client.post("/api/explanations", json={"model": "zoo:sentiment", "text": text})
    assert response.status_code == 200
    assert response.json()["explanations"]["ensemble"]["units"]["texts"] == [text]


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
def test_malformed_json_returns_a_client_error(client: httpx.Client, body: bytes, status: int) -> None:
    response = client.post("/api/explanations", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status and response.json()["error"]


def test_shared_results_can_be_reopened(client: httpx.Client, tmp_path: Any) -> None:
    result = client.post("/api/explanations", json={"model": "zoo:pets", "image": encode_base64(make_png())}).json()
    document = result["explanations"]["ensemble"]
    request = {"explanations": [document], "images": [result["image"]]}
    file = client.post("/api/export", json={**request, "format": "safetensors"})
    assert "attachment" in file.headers["content-disposition"]
    (tmp_path / "why.safetensors").write_bytes(file.content)
    reloaded = clearhead.load_explanation(tmp_path / "why.safetensors")
    assert reloaded.to_dict() == document and reloaded.image is not None
    for content in (
        file.content,
        json.dumps(document).encode(),
        json.dumps({"schema": "clearhead/explanations", **request}).encode(),
    ):
        opened = client.post("/api/open", content=content).json()
        assert opened["explanations"] == [document] and opened["view"]["schema"] == "clearhead/view"
    page = client.post("/api/export", json=request)
    assert page.headers["content-type"].startswith("text/html") and b"Content-Security-Policy" in page.content
    assert client.post("/api/view", json=request).json()["view"]["view"] == "input"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"{", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"[]", "between 1 and 24"),
        (b"{}", "not an explanation"),
        (b'{"schema": "clearhead/explanation", "version": 99}', "newer version of clearhead"),
        (b'{"schema": "clearhead/explanation", "version": 2, "units": 5}', "damaged"),
        (b'{"schema": "clearhead/explanations", "explanations": 5}', "damaged"),
        (b"\x80\x04\x95cos\nsystem\n", "not an explanation"),
        (b"\xff" * 100, "not an explanation"),
        (struct.pack("<Q", 2**62) + b"{}", "not an explanation"),
    ],
)
def test_unknown_and_damaged_files_are_rejected(client: httpx.Client, content: bytes, message: str) -> None:
    response = client.post("/api/open", content=content)
    assert response.status_code == 422 and message in response.json()["error"]
    assert "/tmp" not in response.text  # no path of the server is revealed


def test_model_endpoint_lists_inputs_labels_and_methods(client: httpx.Client) -> None:
    assert [line["name"] for line in client.get("/api/models").json()["models"]] == MODELS
    about = client.get("/api/model", params={"name": "zoo:sentiment", "check_methods": False}).json()
    assert about["input_names"] == ["text"] and about["labels"] == ["NEGATIVE", "POSITIVE"]
    methods = client.get("/api/model", params={"name": "zoo:sentiment"}).json()["methods"]
    assert all(line["applies"] for line in methods) and methods[-1]["family"] == "control"
    assert client.get("/api/model", params={"name": "nope"}).status_code == 422


def test_attention_view_of_every_model_type(client: httpx.Client) -> None:
    result = client.post("/api/attention", json={"model": "zoo:sentiment", "text": TEXT}).json()
    assert result["view"]["view"] == "attention" and result["maps_key"] is None
    both = {"model": "zoo:pets-clip", "text": "a cat", "image": encode_base64(make_png())}
    result = client.post("/api/attention", json=both).json()["view"]
    assert [attention_map["name"] for attention_map in result["maps"]] == ["image", "text"]
    result = client.post("/api/attention", json={"model": "zoo:spell", "text": "phone"}).json()["view"]
    assert [attention_map["name"] for attention_map in result["maps"]] == ["source", "prefix", "prefix → source"]
    cross = result["maps"][2]
    assert cross["key_tokens"] == [*"phone", "</s>"] and cross["tokens"][0] == "</s>" and cross["readout_row"] is None
    detection = client.post("/api/attention", json={"model": "zoo:shapes-detr", "example": 3}).json()["view"]
    assert "queries → image" in [attention_map["name"] for attention_map in detection["maps"]]


LONG = "a gripping film but the ending is dull " * 22


def test_heads_of_a_long_text_are_fetched_individually(client: httpx.Client, sentiment: clearhead.Explainer) -> None:
    result = client.post("/api/attention", json={"model": "zoo:sentiment", "text": LONG}).json()
    n = len(result["view"]["tokens"])
    assert n > 150 and result["view"]["map_size"][0] < n
    head_map = client.get(f"/api/heads/{result['maps_key']}", params={"layer": 2, "head": 5})
    assert head_map.headers["content-type"] == "application/octet-stream" and len(head_map.content) == n * n
    expected = compute_attention_view(sentiment, LONG).get_map(2, 5)
    actual = (np.frombuffer(head_map.content, np.uint8).reshape(n, n) / 255) ** 2
    assert np.abs(np.sqrt(actual) - np.sqrt(expected)).max() <= 0.5 / 255 + 1e-6
    for key, params, status in (
        ("unknown", {"layer": 0, "head": 0}, 404),
        (result["maps_key"], {"layer": 6, "head": 0}, 404),
        (result["maps_key"], {"layer": 0, "head": 0, "name": "other"}, 404),
        (result["maps_key"], {"layer": -1, "head": 0}, 422),
        (result["maps_key"], {"layer": "x", "head": 0}, 422),
    ):
        response = client.get(f"/api/heads/{key}", params=params)
        assert response.status_code == status and response.json()["error"]


def test_attention_cache_evicts_least_recently_used_maps() -> None:
    heads = AttentionCache(max_bytes=3 * 2 * 3 * 10 * 10)
    keys = [heads.add({"": make_attention_view(10)}) for _ in range(3)]
    assert len(heads.get_head_map(keys[0], "", 1, 2)) == 100
    heads.add({"": make_attention_view(10)})
    assert len(heads.get_head_map(keys[0], "", 0, 0)) == 100  # it was used last
    with pytest.raises(KeyError):
        heads.get_head_map(keys[1], "", 0, 0)
    assert (
        heads.cache_and_build_view(make_attention_view(400, 2, 4))["maps_key"] is None
    )  # too large for the cache: summarised


def test_image_is_not_decoded_at_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    convert = Image.Image.convert
    monkeypatch.setattr(Image.Image, "convert", lambda *a, **k: decoded.append("") or convert(*a, **k))
    file = parse_image_upload(encode_base64(make_png(30, 20)), Limits())
    assert file.num_pixels == 600 and decoded == []
    assert decode_uploaded_image(file, Limits()).size == (30, 20) and decoded != []
    body = InputRequest(model="zoo:pets", image=encode_base64(make_png()))
    assert (
        take_image_upload(body, Limits()) is not None and body.image is None
    )  # the base64 text is not kept while waiting


def test_truncated_image_is_reported_as_damaged(client: httpx.Client) -> None:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(make_png(200, 200))).save(buffer, "JPEG")
    body = {"model": "zoo:pets", "image": encode_base64(buffer.getvalue()[: len(buffer.getvalue()) // 2])}
    received = stream_events(client, body)
    assert [event["message"] for event in received if event["event"] == "error"] == [
        "the image cannot be opened (damaged): send a PNG, JPEG, WebP, GIF or BMP"
    ]
    for path in ("/api/explanations", "/api/attention"):
        response = client.post(path, json=body)
        assert response.status_code == 422 and "damaged" in response.json()["error"]


def test_16_bit_image_is_rejected(client: httpx.Client) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.full((64, 64), 257 * 100, dtype=np.uint16)).save(buffer, "PNG")
    response = client.post("/api/explanations", json={"model": "zoo:pets", "image": encode_base64(buffer.getvalue())})
    assert response.status_code == 422 and "save the image with 8 bits per channel" in response.json()["error"]


def test_large_images_are_not_batched(explainers: dict[str, clearhead.Explainer]) -> None:
    model, job = LoadedModel("zoo:pets", explainers["zoo:pets"]), RequestJob("zoo:pets", lambda event: None, 1.0)
    batch_keys = {
        size: ExplainJob(ExplainRequest(model="zoo:pets"), model, UploadedImage(b"", size), job, Limits())
        .make_work_items()[0]
        .batch_key
        for size in (1000, 20_000_000)
    }
    assert batch_keys[1000] is not None and batch_keys[20_000_000] is None


def test_contrast_target_of_a_generated_word(client: httpx.Client) -> None:
    body = {"model": "zoo:spell", "text": "phone", "target": "F", "against": "V"}
    (document,) = client.post("/api/explanations", json=body).json()["explanations"].values()
    target = next(iter(document["by_stream"].values()))["target"] if "by_stream" in document else document["target"]
    assert target["kind"] == "contrast" and target["name"] == "F − V" and target["against"] == "V"
