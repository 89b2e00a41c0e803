"""Which tool fields work without a grammar, and what becomes of the calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsserve.chat.messages import check_tool
from dsserve.chat.settings import ApiProfile
from dsserve.errors import InvalidRequest, Unsupported, shown


@dataclass(frozen=True, kw_only=True)
class ToolPolicy:
    """How a stream treats tool calls.

    Attributes:
        has_tools: The body lists tools, so the calls markup is parsed, whatever `tool_choice` says.
        drops_calls: `tool_choice: "none"`: calls the model makes all the same are not reported.
        allows_parallel: False: the reply ends where a second call would begin.
    """

    has_tools: bool = False
    drops_calls: bool = False
    allows_parallel: bool = True


def tool_policy(body: Mapping[str, Any], *, is_thinking: bool, profile: ApiProfile) -> ToolPolicy:
    """Read the tool fields of a chat body.

    A call may be demanded (`tool_choice` required or named) only without thinking: the prompt then
    opens the calls block and parsing starts inside it. Nothing forces the model to go on with a
    well-formed call, or with the named tool.

    Raises:
        InvalidRequest: A call is demanded although there are no tools.
        Unsupported: What needs a grammar: strict tools, a demanded call while thinking. In the
            `deepseek` profile the latter is left to the recipe, which refuses it by its own message.
    """
    tools = body.get("tools") or []
    choice = body.get("tool_choice")
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools must be a list, not {shown(tools)}", param="tools")
    for index, tool in enumerate(tools):
        check_tool(tool, index)
        _check_not_strict(tool, index)
    if choice == "required" or isinstance(choice, Mapping):
        if not tools:
            raise InvalidRequest(
                "tool_choice demands a call, but there are no tools", param="tools"
            )
        if is_thinking and profile == "open":
            raise Unsupported(
                "tool_choice required or a named tool does not work yet while thinking; "
                'switch thinking off ({"thinking": {"type": "disabled"}}) or use auto',
                param="tool_choice",
            )
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequest(
            f"parallel_tool_calls must be true or false, not {shown(parallel)}",
            param="parallel_tool_calls",
        )
    return ToolPolicy(
        has_tools=bool(tools),
        drops_calls=choice == "none",
        allows_parallel=parallel is not False,
    )


def _check_not_strict(tool: object, index: int) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if isinstance(function, Mapping) and function.get("strict"):
        param = f"tools[{index}].function.strict"
        raise Unsupported(f"{param} does not work yet; leave it out", param=param)
