"""The OpenAPI document of the web API: requests from their classes, explanations in the JSON form of `to_dict()`."""

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
    403: "The request comes from another site.",
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
    """Return the responses of a route: its own, and the errors that every route can return."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    error_responses: dict[int | str, dict[str, Any]] = {
        code: {"description": _ERROR_DESCRIPTIONS[code], "content": content}
        for code in sorted({*status_codes, 400, 401, 403, 405, 408})
    }
    json_ok = {"description": "The result.", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {200: ok_response or json_ok, **error_responses}


def build_openapi_schema(app: FastAPI, model_names: Iterable[str]) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes, description=__doc__)
        _add_name_enums(schema, list(model_names))
        component_schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        component_schemas |= {
            "Explanation": _load_result_schema("explanation"),
            "MultiStreamExplanation": _load_result_schema("multi_stream_explanation"),
        }
        component_schemas |= {"Event": _EVENT_SCHEMA, "Error": _ERROR_SCHEMA}
        app.openapi_schema = schema
    return app.openapi_schema


def _add_name_enums(schema: dict[str, Any], models: list[str]) -> None:
    """List the names of models and methods in the schemas of the parameters that take them."""
    component_schemas = schema["components"]["schemas"]
    for request in ("ExplainRequest", "InputRequest"):
        component_schemas[request]["properties"]["model"]["enum"] = models
    component_schemas["ExplainRequest"]["properties"]["methods"]["items"]["enum"] = sorted(METHOD_REGISTRY)
    for parameter in schema["paths"]["/api/model"]["get"]["parameters"]:
        if parameter["name"] == "name":
            parameter["schema"]["enum"] = models


def _load_result_schema(name: str) -> Any:
    """Load the schema of an explanation; its references are changed to point into the OpenAPI document."""
    text = (files("clearhead.explanation") / f"{name}.schema.json").read_text(encoding="utf-8")
    location = "#/components/schemas/Explanation"
    text = text.replace('"#/$defs/', f'"{location}/$defs/').replace(
        '"urn:clearhead:explanation:2" }', f'"{location}" }}'
    )
    schema = json.loads(text)
    for key in ("$schema", "$id"):
        del schema[key]
    return schema
