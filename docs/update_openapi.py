"""Writes the OpenAPI documents: aglite/gateway/openapi.json, the model routes with their request bodies as the official
SDKs type them, and docs/control-openapi.json, the control API as its own code describes it.

    python docs/update_openapi.py            write them
    python docs/update_openapi.py --check    exit 1 if one is not up to date

The gateway ignores fields that it does not know, so the bodies are what clients send, not all that is served: images,
audio and hosted tools are refused or left out, as docs/gateway.md says. Of its document only the paths are checked, for
bodies follow the SDKs' versions.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(__file__).parent.parent / "aglite" / "gateway" / "openapi.json"
CONTROL = Path(__file__).parent / "control-openapi.json"
JSON, EVENTS = "application/json", "text/event-stream"

POSTS = {
    "/v1/chat/completions": ("chat", "Chat Completions (OpenAI)"),
    "/v1/completions": ("completions", "Completions (OpenAI): text or token ids"),
    "/v1/responses": ("responses", "Responses (OpenAI)"),
    "/v1/messages": ("messages", "Messages (Anthropic)"),
    "/v1/messages/count_tokens": ("count_tokens", "Length of a prompt (Anthropic)"),
}
GETS = {
    "/v1/models": "The model that is served",
    "/v1/models/{model}": "The same, by its name",
    "/v1/responses/{response_id}": "An earlier reply of the rollout (OpenAI Responses)",
}
ANSWERS = {
    "200": "the reply",
    "400": "the request cannot be served as it is; the message names the field",
    "401": "no running rollout has this token",
    "403": "a limit of the rollout is reached",
    "404": "no such thing",
    "408": "the body did not arrive in time",
    "413": "the body is longer than the rollout may send",
    "415": "the body is compressed or no JSON",
    "503": "the model is not available now; Retry-After says when to come again",
}


def bodies() -> tuple[dict[str, Any], dict[str, Any]]:
    """Request body schema of each dialect, and the definitions that they share."""
    from anthropic.types import message_count_tokens_params, message_create_params
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params
    from pydantic import TypeAdapter

    kinds = {
        "chat": chat_params.CompletionCreateParamsBase,
        "completions": completion_create_params.CompletionCreateParamsBase,
        "responses": response_create_params.ResponseCreateParamsBase,
        "messages": message_create_params.MessageCreateParamsBase,
        "count_tokens": message_count_tokens_params.MessageCountTokensParams,
    }
    streamed = set(kinds) - {"count_tokens"}
    schemas, shared = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(kind)) for name, kind in kinds.items()],
        ref_template="#/components/schemas/{model}",
    )
    definitions = shared.get("$defs", {})
    made = {}
    for name in kinds:
        schema: dict[str, Any] = dict(schemas[(name, "validation")])
        reference = schema.get("$ref", "").rpartition("/")[2]
        if reference:
            schema = definitions.pop(reference)
        if name in streamed:  # the bases leave it to their two heirs
            schema["properties"]["stream"] = {"type": "boolean"}
        made[name] = _bare(schema)
    return made, {name: _bare(schema) for name, schema in definitions.items()}


def _bare(schema: Any) -> Any:
    """A schema without its prose, which is the SDKs' own documentation and long."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    # A property may itself be called title or description: its value is then a schema.
    prose = {key for key in ("title", "description") if isinstance(schema.get(key), str)}
    return {key: _bare(value) for key, value in schema.items() if key not in prose}


def document() -> dict[str, Any]:
    schemas, definitions = bodies()
    paths: dict[str, Any] = {}
    for path, (name, summary) in POSTS.items():
        content = {JSON: {"schema": {"type": "object"}}}
        if name != "count_tokens":
            content[EVENTS] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "operationId": name,
                "summary": summary,
                "requestBody": {"required": True, "content": {JSON: {"schema": schemas[name]}}},
                "responses": _answers(content),
            }
        }
    for path, summary in GETS.items():
        name = path.rpartition("/")[2]
        operation: dict[str, Any] = {"summary": summary, "responses": _answers({JSON: {"schema": {"type": "object"}}})}
        if name.startswith("{"):
            field = {"name": name.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [field]
        paths[path] = {"get": operation}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "aglite's gateway",
            "version": "1",
            "description": "What an agent sees, under http://HOST:PORT/rollouts/ROLLOUT or, as the token names the "
            "rollout too, at the root. Bodies are typed after the openai and anthropic packages.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}],
    }


def _answers(content: dict[str, Any]) -> dict[str, Any]:
    error = {JSON: {"schema": {"type": "object", "required": ["error"]}}}
    return {
        status: {"description": text, "content": content if status == "200" else error}
        for status, text in ANSWERS.items()
    }


def control_document() -> dict[str, Any]:
    """What `GET /api/openapi.json` of a supervisor answers."""
    from aglite.control import create_control_app

    supervisor: Any = SimpleNamespace(store=None)  # its routes are described, not called
    return json.loads(json.dumps(create_control_app(supervisor, "").openapi()))


def outline(control: dict[str, Any]) -> Any:
    """What of the control API's document is aglite's own: its words may change with the version of FastAPI."""
    routes = {
        (path, method): ([one["name"] for one in operation.get("parameters", ())], sorted(operation["responses"]))
        for path, operations in control["paths"].items()
        for method, operation in operations.items()
    }
    shapes = {
        name: (sorted(shape.get("properties", ())), sorted(shape.get("required", ())))
        for name, shape in control["components"]["schemas"].items()
    }
    return routes, shapes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    control = control_document()
    if parser.parse_args().check:
        gateway_current = set(json.loads(FILE.read_text())["paths"]) == {*POSTS, *GETS}
        control_current = CONTROL.is_file() and outline(json.loads(CONTROL.read_text())) == outline(control)
        for file, current in ((FILE, gateway_current), (CONTROL, control_current)):
            if not current:
                print(f"{file} is not up to date: run python docs/update_openapi.py", file=sys.stderr)
        return 0 if gateway_current and control_current else 1
    FILE.write_text(json.dumps(document(), indent=0, separators=(",", ":"), sort_keys=True) + "\n")
    CONTROL.write_text(json.dumps(control, indent=1) + "\n")
    for file in (FILE, CONTROL):
        print(f"{file}: {file.stat().st_size // 1024} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
