"""`/openapi.json`: every route, and the bodies of requests.

The schemas are generated from the structs that decode requests, so that they can't differ.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import vlm_server
from vlm_server.api.admin.route_summaries import SUMMARIES, TAG_OF
from vlm_server.api.http.errors import ErrorBody
from vlm_server.errors import RequestError

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RouteBody:
    """The body of a route: one of `structs`; any bytes, if there is none.

    The first struct also accepts `harmless` fields with any value, and `neutral` ones with theirs.
    """

    structs: tuple[type[msgspec.Struct], ...]
    harmless: Collection[str] = ()
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the query or the headers of a route; `kind` is its type in JSON Schema."""

    name: str
    place: Literal["query", "header"]
    kind: str
    method: str = "GET"

    def described(self) -> Json:
        return {"name": self.name, "in": self.place, "schema": {"type": self.kind}}


def constant_endpoint(make: Callable[[], Any]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a constant JSON value, made at the first request."""
    body = cache(lambda: msgspec.json.encode(make()))

    async def show(_: Request) -> Response:
        return Response(body(), media_type="application/json")

    return show


def document(
    routes: Sequence[Route],
    bodies: Mapping[str, RouteBody],
    parameters: Mapping[str, Sequence[Parameter]],
) -> Json:
    """The description of an application, as OpenAPI 3.1 has it."""
    structs = list(dict.fromkeys(struct for body in bodies.values() for struct in body.structs))
    schemas, components = msgspec.json.schema_components([ErrorBody, *structs], ref_template=_REF)
    refs = dict(zip(structs, schemas[1:], strict=True))
    paths: dict[str, Json] = {}
    for route in filter(lambda each: each.include_in_schema, routes):
        path = _PARAMETER.sub(r"{\1}", route.path)
        body = bodies.get(route.path)
        if body is not None and body.structs:
            _allow(components[_name(refs[body.structs[0]])], body)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _operation(route, method, path, schemas[0])
            if body is not None and method in ("POST", "PUT"):
                schemas_of_body = [refs[struct] for struct in body.structs]
                operation["requestBody"] = _request_body(schemas_of_body, body.content_type)
            described = [
                each.described() for each in parameters.get(route.path, ()) if each.method == method
            ]
            if described:
                operation["parameters"] = operation.get("parameters", []) + described
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "vlm_server", "version": vlm_server.__version__},
        "tags": [{"name": tag} for tag in SUMMARIES],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _allow(schema: Json, body: RouteBody) -> None:
    """Add the accepted fields that the struct does not have."""
    values_by_name = {name: {"enum": list(values)} for name, values in body.neutral.items()}
    values_by_name |= {name: {} for name in sorted(body.harmless)}
    schema["properties"] = {**schema["properties"], **values_by_name}


def _name(ref: Json) -> str:
    return str(ref["$ref"]).rpartition("/")[2]


def _request_body(schemas: list[Any], content_type: str) -> Json:
    if not schemas:
        return {"required": True, "content": {content_type: {}}}
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"required": True, "content": {content_type: {"schema": schema}}}


def _operation(route: Route, method: str, path: str, error: Any) -> Json:
    names = _PARAMETER.findall(route.path)
    error_response: Json = {
        "description": "An error; `code` is of: " + ", ".join(_codes()),
        "content": {"application/json": {"schema": error}},
    }
    tag = TAG_OF[f"{method} {path}"]
    operation: Json = {
        "tags": [tag],
        "summary": SUMMARIES[tag][f"{method} {path}"],
        "operationId": re.sub(r"\W+", "_", f"{method.lower()} {route.path}").strip("_"),
        "responses": {
            "200": {"description": "The answer, as the project's documentation has it."},
            "default": error_response,
        },
    }
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _codes() -> list[str]:
    codes = set[str]()
    kinds = [RequestError]
    while kinds:
        kind = kinds.pop()
        codes.add(kind.code)
        kinds += kind.__subclasses__()
    return sorted(codes)
