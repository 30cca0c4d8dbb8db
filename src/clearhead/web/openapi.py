"""The API described: requests from their classes, results by the same schema as `to_dict()`."""

import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from clearhead.methods.base import METHOD_REGISTRY

_ANY_EXPLANATION_SCHEMA = {
    "anyOf": [{"$ref": "#/components/schemas/Explanation"}, {"$ref": "#/components/schemas/MultiStreamExplanation"}]
}
_IMAGE_SCHEMA = {"type": ["string", "null"], "description": "The image as the model received it, as a data: URL."}
_ERROR_DESCRIPTIONS = {
    400: "The request is not addressed to this server, or its body is not JSON.",
    401: "The token is missing or wrong.",
    403: "From another page.",
    404: "Not found.",
    405: "Method not allowed.",
    408: "The request was not received in time.",
    413: "The request is too large.",
    422: "The request cannot be fulfilled; the error states the reason and the alternatives.",
    429: "Too many requests are queued. Retry-After gives the number of seconds to wait before the next attempt.",
}
EVENT_STREAM_RESPONSE = {
    "description": (
        "One JSON object per line: queued, started, progress, explanation, comparison, view, error; finally done, "
        "cancelled or expired."
    ),
    "content": {"application/x-ndjson": {"schema": {"$ref": "#/components/schemas/Event"}}},
}
ROUTE_SCHEMAS: dict[str, Any] = {
    "explanations": {
        "description": "The results by method, and the methods that failed, with the reason.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["explanations", "errors"],
                    "properties": {
                        "explanations": {"type": "object", "additionalProperties": _ANY_EXPLANATION_SCHEMA},
                        "errors": {"type": "object", "additionalProperties": {"type": "string"}},
                        "comparison": {"type": ["object", "null"]},
                        "image": _IMAGE_SCHEMA,
                    },
                }
            }
        },
    },
    "open": {
        "description": "The contents of the file, and how the page displays them.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["explanations", "view"],
                    "properties": {
                        "explanations": {"type": "array", "items": _ANY_EXPLANATION_SCHEMA},
                        "images": {"type": "array", "items": _IMAGE_SCHEMA},
                        "view": {"type": "object"},
                    },
                }
            }
        },
    },
    "head": {
        "description": "The map, query by key.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    },
    "export": {
        "description": "The file.",
        "content": {"text/html": {"schema": {"type": "string"}}, "application/octet-stream": {}},
    },
    "file_upload": {
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
}
_EVENT_SCHEMA = {
    "type": "object",
    "required": ["event"],
    "properties": {
        "event": {
            "enum": [
                *("queued", "started", "progress", "explanation", "comparison", "view", "error"),
                *("done", "cancelled", "expired"),
            ]
        },
        "id": {"type": "string", "description": "queued: id with which the request can be cancelled."},
        "num_before": {
            "type": "integer",
            "description": "queued: number of requests that run or wait before this one.",
        },
        "timeout_seconds": {"type": "number", "description": "queued: time limit of the request."},
        "elapsed_seconds": {"type": "number", "description": "progress, done: time since the start."},
        "methods": {"type": "array", "items": {"type": "string"}},
        "method": {"type": "string"},
        "num_inputs": {"type": "integer", "description": "progress: number of inputs that the model has processed."},
        "expected_inputs": {
            "type": "integer",
            "description": "progress: expected total number of inputs, from the declared cost of the method.",
        },
        "explanation": _ANY_EXPLANATION_SCHEMA,
        "image": _IMAGE_SCHEMA,
        "message": {"type": "string"},
    },
}
_ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def build_responses(*status_codes: int, ok_response: dict[str, Any] | None = None) -> dict[int | str, dict[str, Any]]:
    """The answers of one route: those of its own, and those that every route has."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    made: dict[int | str, dict[str, Any]] = {
        code: {"description": _ERROR_DESCRIPTIONS[code], "content": content}
        for code in sorted({*status_codes, 400, 401, 403, 405, 408})
    }
    json_ok = {"description": "As asked.", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {200: ok_response or json_ok, **made}


def build_openapi_schema(app: FastAPI, model_names: Iterable[str]) -> dict[str, Any]:
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes, description=__doc__)
        _add_name_enums(made, list(model_names))
        parts = made.setdefault("components", {}).setdefault("schemas", {})
        parts |= {
            "Explanation": _load_result_schema("explanation"),
            "MultiStreamExplanation": _load_result_schema("multi_stream_explanation"),
        }
        parts |= {"Event": _EVENT_SCHEMA, "Error": _ERROR_SCHEMA}
        app.openapi_schema = made
    return app.openapi_schema


def _add_name_enums(made: dict[str, Any], models: list[str]) -> None:
    """The models and methods that there are, where one is to be named."""
    parts = made["components"]["schemas"]
    for ask in ("ExplainRequest", "InputRequest"):
        parts[ask]["properties"]["model"]["enum"] = models
    parts["ExplainRequest"]["properties"]["methods"]["items"]["enum"] = sorted(METHOD_REGISTRY)
    for parameter in made["paths"]["/api/model"]["get"]["parameters"]:
        if parameter["name"] == "name":
            parameter["schema"]["enum"] = models


def _load_result_schema(name: str) -> Any:
    """A schema of a result, as a part of this document: its references point into it."""
    text = (files("clearhead.explanation") / f"{name}.schema.json").read_text(encoding="utf-8")
    here = "#/components/schemas/Explanation"
    text = text.replace('"#/$defs/', f'"{here}/$defs/').replace('"urn:clearhead:explanation:1" }', f'"{here}" }}')
    found = json.loads(text)
    for key in ("$schema", "$id"):
        del found[key]
    return found
