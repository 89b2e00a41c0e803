"""Is the reply to begin with reasoning, and with how much of it?"""

from collections.abc import Mapping
from typing import Any

from dsserve.errors import InvalidRequest, Unsupported, shown

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
_THINKING_TYPES = ("enabled", "disabled", "adaptive")
_TEMPLATE_KWARGS = ("thinking", "enable_thinking", "reasoning_effort")


def thinking_fields(
    body: Mapping[str, Any], default_template_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the `thinking` and `reasoning_effort` fields that the recipe is to see.

    The request's own fields win over its `chat_template_kwargs`, these over the server's. With none
    of them the recipe thinks.

    Args:
        body: The chat body; `thinking`, `reasoning_effort` and `chat_template_kwargs` are read.
        default_template_kwargs: `--default-chat-template-kwargs`.

    Raises:
        InvalidRequest: A value has the wrong type, or two contradict each other.
        Unsupported: An effort as a number, or an unknown template argument.
    """
    kwargs = template_kwargs(body.get("chat_template_kwargs"), "chat_template_kwargs")
    defaults = template_kwargs(default_template_kwargs, "default_chat_template_kwargs")
    fields = {
        name: body[name] for name in ("thinking", "reasoning_effort") if body.get(name) is not None
    }
    if "reasoning_effort" in fields:
        check_effort(fields["reasoning_effort"])
    if "thinking" in fields:
        _check_thinking(fields["thinking"])
    if "thinking" not in fields:
        if "thinking" in kwargs:
            fields["thinking"] = _thinking(is_on=kwargs["thinking"])
        elif not fields and "reasoning_effort" not in kwargs and "thinking" in defaults:
            fields["thinking"] = _thinking(is_on=defaults["thinking"])
    if "reasoning_effort" not in fields:
        effort = kwargs.get("reasoning_effort", defaults.get("reasoning_effort"))
        if effort is not None:
            fields["reasoning_effort"] = effort
    return fields


def is_thinking(fields: Mapping[str, Any]) -> bool:
    """Whether the recipe will think, given the result of `thinking_fields`."""
    thinking = fields.get("thinking")
    if isinstance(thinking, Mapping):
        return thinking.get("type") != "disabled"
    return fields.get("reasoning_effort") != "none"


def template_kwargs(value: object, param: str) -> dict[str, Any]:
    """Check `chat_template_kwargs`; `enable_thinking` is folded into `thinking`.

    Raises:
        InvalidRequest: A value has the wrong type, or the two names contradict each other.
        Unsupported: An argument that no template of ours has.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} must be an object, not {shown(value)}", param=param)
    for name in value:
        if name not in _TEMPLATE_KWARGS:
            known = ", ".join(_TEMPLATE_KWARGS)
            raise Unsupported(
                f"{param}.{shown(name)[1:-1]} is not supported; known are {known}",
                param=f"{param}.{name}"[:256],
            )
    kwargs = {name: setting for name, setting in value.items() if setting is not None}
    for name in ("thinking", "enable_thinking"):
        if not isinstance(kwargs.get(name, True), bool):
            raise InvalidRequest(
                f"{param}.{name} must be true or false, not {shown(kwargs[name])}",
                param=f"{param}.{name}",
            )
    if "enable_thinking" in kwargs:
        enable_thinking = kwargs.pop("enable_thinking")
        if kwargs.setdefault("thinking", enable_thinking) is not enable_thinking:
            raise InvalidRequest(f"{param}: thinking and enable_thinking differ", param=param)
    if "reasoning_effort" in kwargs:
        check_effort(kwargs["reasoning_effort"])
    return kwargs


def check_effort(effort: object) -> None:
    """Refuse what the prompt encoding cannot express.

    Raises:
        InvalidRequest: Neither a known name nor a number.
        Unsupported: A number (a thinking budget): the recipe renders names only.
    """
    if isinstance(effort, int | float) and not isinstance(effort, bool):
        raise Unsupported(
            f"reasoning_effort {effort} as a number does not work yet; "
            "use none, low, medium, high or max",
            param="reasoning_effort",
        )
    if effort not in _EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort must be one of {', '.join(_EFFORTS)}, not {shown(effort)}",
            param="reasoning_effort",
        )


def _check_thinking(thinking: object) -> None:
    kind = thinking.get("type") if isinstance(thinking, Mapping) else None
    if kind not in _THINKING_TYPES:
        given = "it has none" if kind is None else f"not {shown(kind)}"
        raise InvalidRequest(
            f"thinking must be an object with a type of {', '.join(_THINKING_TYPES)}; {given}",
            param="thinking",
        )


def _thinking(*, is_on: bool) -> dict[str, str]:
    return {"type": "enabled" if is_on else "disabled"}
