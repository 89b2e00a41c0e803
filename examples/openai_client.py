"""Checks a running server with the `openai` client, the way a user would use it.

    python examples/openai_client.py --base-url http://127.0.0.1:30000
    python examples/openai_client.py --base-url http://127.0.0.1:30000 --fake-url http://127.0.0.1:30001

Chat with and without streaming, thinking on and off, two choices, a stop string, 32 streams at once; in the
end the server must hold nothing (`/get_server_info`). A model with random weights never writes a tool call,
so that part talks to a server of the fake model (`dsserve launch --load-format fake`), which emits the ids
it is told to by `custom_params.script`; without `--fake-url` it is skipped, and said so.

Exit code 0 if everything passed, 1 otherwise.
"""
# The markers of DeepSeek's format are written with full-width bars.
# ruff: noqa: RUF001

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

QUESTION: list[Any] = [{"role": "user", "content": "Say something short."}]
THINKING_OFF = {"thinking": {"type": "disabled"}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
# What a V4.1 model writes to call the tool.
TOOL_CALL_TEXT = (
    "<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="get_weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Hangzhou</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls>"
)
EOS_TEXT = "<｜end▁of▁sentence｜>"


class Checks:
    """Runs checks and remembers which failed."""

    def __init__(self) -> None:
        self.failures = 0

    def expect(self, condition: bool, what: str) -> None:
        """Say whether something held."""
        self.failures += not condition
        say(f"{'ok  ' if condition else 'FAIL'} {what}")


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(text + "\n")


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--fake-url", help="a server of the fake model, for the tool call")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args()
    checks = Checks()
    with OpenAI(base_url=f"{options.base_url}/v1", api_key=options.api_key) as client:
        model = client.models.list().data[0].id
        say(f"model {model} at {options.base_url}")
        check_answers(checks, client, model, options.max_tokens)
        check_stop(checks, client, model, options.max_tokens)
    asyncio.run(check_parallel(checks, options, model))
    if options.fake_url is None:
        say("skip tool call: no --fake-url (random weights write no tool call)")
    else:
        check_tool_call(checks, options.fake_url, options.api_key)
        check_idle(checks, options.fake_url, options.api_key)
    check_idle(checks, options.base_url, options.api_key)
    say(f"{checks.failures} checks failed" if checks.failures else "all checks passed")
    return 1 if checks.failures else 0


def check_answers(checks: Checks, client: OpenAI, model: str, max_tokens: int) -> None:
    """Whole and streamed answers, thinking on and off, several choices, usage."""
    for name, body in (("thinking", {}), ("no thinking", THINKING_OFF)):
        answer = client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=max_tokens, extra_body=body
        )
        usage = answer.usage
        checks.expect(
            answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
            and usage is not None
            and 0 < usage.completion_tokens <= max_tokens
            and usage.prompt_tokens_details is not None,
            f"{name}: an answer with usage",
        )
        chunks = list(
            client.chat.completions.create(
                model=model,
                messages=QUESTION,
                max_tokens=max_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=body,
            )
        )
        finished = [c for c in chunks if c.choices and c.choices[0].finish_reason]
        checks.expect(
            len(finished) == 1 and not chunks[-1].choices and chunks[-1].usage is not None,
            f"{name}: a stream of {len(chunks)} chunks with one finish reason and usage at the end",
        )
    greedy: dict[str, Any] = {
        "model": model,
        "messages": QUESTION,
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": THINKING_OFF,
    }
    whole = client.chat.completions.create(**greedy).choices[0].message.content or ""
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(stream=True, **greedy)
        if chunk.choices
    )
    checks.expect(whole == streamed, "greedy: streamed text equals the whole text")
    two = client.chat.completions.create(n=2, **greedy)
    checks.expect(
        [choice.index for choice in two.choices] == [0, 1]
        and two.choices[0].message.content == two.choices[1].message.content,
        "n = 2: two choices, equal because greedy",
    )


def check_stop(checks: Checks, client: OpenAI, model: str, max_tokens: int) -> None:
    """A stop string cuts the text before it."""
    ask: dict[str, Any] = {"model": model, "prompt": "Once upon a time", "temperature": 0}
    text = client.completions.create(max_tokens=max_tokens, **ask).choices[0].text
    if len(text) < 4:
        say("skip stop string: the model wrote too little")
        return
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    choice = client.completions.create(max_tokens=max_tokens, stop=stop, **ask).choices[0]
    checks.expect(
        choice.finish_reason == "stop" and choice.text == text[: text.index(stop)],
        f"stop string {stop!r}: text ends before it",
    )


async def check_parallel(checks: Checks, options: argparse.Namespace, model: str) -> None:
    """32 streams at once all end."""
    async with AsyncOpenAI(
        base_url=f"{options.base_url}/v1", api_key=options.api_key, timeout=600
    ) as client:

        async def one(index: int) -> str | None:
            reason = None
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"Tell me about the number {index}."}],
                max_tokens=options.max_tokens,
                stream=True,
            )
            async for chunk in stream:
                if chunk.choices:
                    reason = chunk.choices[0].finish_reason or reason
            return reason

        started_s = time.monotonic()
        reasons = await asyncio.gather(*map(one, range(32)))
        checks.expect(
            all(reasons), f"32 streams at once ended in {time.monotonic() - started_s:.1f} s"
        )


def check_tool_call(checks: Checks, url: str, api_key: str) -> None:
    """The fake model is told to write a tool call; it must come out parsed."""
    text = TOOL_CALL_TEXT + EOS_TEXT
    body = {"prompt": text, "add_special_tokens": False}
    ids = httpx.post(f"{url}/tokenize", json=body, headers=_headers(api_key)).json()["tokens"]
    with OpenAI(base_url=f"{url}/v1", api_key=api_key) as client:
        ask: dict[str, Any] = {
            "model": client.models.list().data[0].id,
            "messages": QUESTION,
            "tools": [TOOL],
            "max_tokens": len(ids) + 8,
            "extra_body": THINKING_OFF | {"custom_params": {"script": {"ids": ids}}},
        }
        choice = client.chat.completions.create(**ask).choices[0]
        calls = choice.message.tool_calls or []
        function: Any = calls[0].function if calls else None
        checks.expect(
            choice.finish_reason == "tool_calls"
            and function is not None
            and function.name == "get_weather"
            and json.loads(function.arguments) == {"city": "Hangzhou", "days": 3},
            "tool call: parsed from the output",
        )
        name, arguments, reason = "", "", None
        for chunk in client.chat.completions.create(stream=True, **ask):
            if not chunk.choices:
                continue
            reason = chunk.choices[0].finish_reason or reason
            for call in chunk.choices[0].delta.tool_calls or ():
                if call.function is not None:
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
        checks.expect(
            name == "get_weather" and reason == "tool_calls" and json.loads(arguments)["days"] == 3,
            "tool call: streamed",
        )


def check_idle(checks: Checks, url: str, api_key: str) -> None:
    """Nothing is held once nothing runs; the server checks its own accounting for this."""
    info: dict[str, Any] = {}
    for _ in range(100):
        info = httpx.get(f"{url}/get_server_info", headers=_headers(api_key), timeout=60).json()
        if is_idle(info["state"] or {}):
            break
        time.sleep(0.05)
    state = info["state"] or {}
    checks.expect(
        info["state_error"] is None and is_idle(state),
        f"{url}: pools idle, invariants hold: {json.dumps(state.get('pools'))}",
    )


def is_idle(state: dict[str, Any]) -> bool:
    """Tell whether no request is left and no pool unit is in use or in quarantine."""
    pools = state.get("pools", [])
    stats = state.get("stats", {})
    return (
        bool(pools)
        and all(
            pool["locked"] == pool["private"] == pool["quarantined"] == 0
            and pool["free"] + pool["evictable"] == pool["capacity"]
            for pool in pools
        )
        and not stats.get("num_running")
        and not stats.get("num_waiting")
    )


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}


if __name__ == "__main__":
    sys.exit(main())
