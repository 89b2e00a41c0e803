"""Reads a request body as strict JSON and checks it against a pydantic model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from dsserve.entrypoints.errors import validation_error
from dsserve.errors import Cancelled, InvalidRequest

if TYPE_CHECKING:
    from starlette.requests import Request

Body = TypeVar("Body", bound=BaseModel)


async def read_bytes(request: Request) -> bytes:
    """Return the whole body.

    Raises:
        PayloadTooLarge: If it is above `--max-payload-size`.
        Cancelled: If the client leaves before it is complete.
    """
    try:
        return await request.body()
    except ClientDisconnect as error:
        raise Cancelled("the client left while sending its request") from error


async def body_size(request: Request) -> int:
    """Return the bytes of a body: whatever a request holds (tools, too), it has no more text."""
    return len(await read_bytes(request))


async def read_object(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object; an empty body counts as `{}`.

    JSON's own rules hold: no NaN, no Infinity, no lone surrogate, no invalid UTF-8.

    Raises:
        InvalidRequest: If it is anything else.
    """
    raw = await read_bytes(request)
    if not raw:
        return {}
    return parse_object(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that `raw` spells.

    Raises:
        InvalidRequest: If it spells none.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"the request body is not valid JSON: {error}", code="invalid_json"
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"the request body must be a JSON object, not {_json_type(value)}", code="invalid_json"
        )
    return value


def validate(model: type[Body], value: dict[str, Any]) -> Body:
    """Return `value` as an instance of `model`.

    Raises:
        InvalidRequest: With the path of the first field that does not fit.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from error


def request_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return what `openapi_extra` needs to document a body that the endpoint reads by itself."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _inline(schema, definitions)}},
        }
    }


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Replace local references, which mean nothing inside the OpenAPI document."""
    if isinstance(node, dict):
        reference = node.get("$ref")
        if isinstance(reference, str):
            return _inline(definitions[reference.rsplit("/", 1)[-1]], definitions)
        return {key: _inline(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_inline(value, definitions) for value in node]
    return node


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
