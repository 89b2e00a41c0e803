"""Are messages and tools shaped as the protocol has them?

deepseek-recipe checks them too, but its messages name neither the message nor the field.
"""

from collections.abc import Mapping
from typing import Any

from dsserve.errors import InvalidRequest, shown

_ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_PART_TYPES = ("text", "image_url", "file")


def check_message(message: object, index: int) -> None:
    """Check one element of `messages`.

    Raises:
        InvalidRequest: Naming the field as `messages[3].content`.
    """
    where = f"messages[{index}]"
    fields = _object(message, where)
    role = fields.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    is_assistant = role == "assistant"
    _check_content(fields.get("content"), f"{where}.content", is_optional=is_assistant)
    _text_or_nothing(fields.get("reasoning_content"), f"{where}.reasoning_content")
    if role == "tool" and not isinstance(fields.get("tool_call_id"), str):
        raise _wrong(
            f"{where}.tool_call_id", "the id of a call of the assistant", fields.get("tool_call_id")
        )
    _check_prefix(fields.get("prefix"), f"{where}.prefix", is_assistant=is_assistant)
    calls = fields.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list) or not calls:
        raise _wrong(f"{where}.tool_calls", "a list of at least one call, or left out", calls)
    for call_index, call in enumerate(calls):
        _check_call(call, f"{where}.tool_calls[{call_index}]")


def check_tool(tool: object, index: int) -> None:
    """Check one element of `tools`.

    Raises:
        InvalidRequest: Naming the field as `tools[0].function.name`.
    """
    where = f"tools[{index}]"
    fields = _object(tool, where)
    if fields.get("type") != "function":
        raise _wrong(f"{where}.type", "'function'", fields.get("type"))
    function = _object(fields.get("function"), f"{where}.function")
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{where}.function.name", "a string", function.get("name"))
    _text_or_nothing(function.get("description"), f"{where}.function.description")


def _check_content(content: object, where: str, *, is_optional: bool) -> None:
    if isinstance(content, str) or (content is None and is_optional):
        return
    if not isinstance(content, list):
        raise _wrong(where, "a string or a list of parts", content)
    for index, part in enumerate(content):
        fields = _object(part, f"{where}[{index}]")
        kind = fields.get("type")
        if kind not in _PART_TYPES:
            raise _wrong(f"{where}[{index}].type", "'text' (this server takes text only)", kind)
        if kind == "text" and not isinstance(fields.get("text"), str):
            raise _wrong(f"{where}[{index}].text", "a string", fields.get("text"))


def _check_call(call: object, where: str) -> None:
    fields = _object(call, where)
    if not isinstance(fields.get("id"), str):
        raise _wrong(f"{where}.id", "a string, which the tool's answer repeats", fields.get("id"))
    if fields.get("type") != "function":
        raise _wrong(f"{where}.type", "'function'", fields.get("type"))
    function = _object(fields.get("function"), f"{where}.function")
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{where}.function.name", "a string", function.get("name"))
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        raise _wrong(f"{where}.function.arguments", "a string that holds JSON", arguments)


def _check_prefix(prefix: object, where: str, *, is_assistant: bool) -> None:
    if prefix is not None and not isinstance(prefix, bool):
        raise _wrong(where, "true or false", prefix)
    if prefix and not is_assistant:
        raise InvalidRequest(f"{where}: only an assistant message can be a prefix", param=where)


def _text_or_nothing(value: object, where: str) -> None:
    if value is not None and not isinstance(value, str):
        raise _wrong(where, "a string", value)


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object", value)
    return value


def _wrong(where: str, needed: str, value: object) -> InvalidRequest:
    given = "missing" if value is None else f"not {shown(value)}"
    return InvalidRequest(f"{where} must be {needed}, {given}", param=where)
