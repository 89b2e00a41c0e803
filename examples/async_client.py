"""Many questions at once with the asynchronous `openai` client, each answer printed as it comes.

python examples/async_client.py --base-url http://127.0.0.1:30000 "First question" "Second question"
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, model: str, index: int, question: str) -> None:
    """Stream one answer; reasoning and content arrive in fields of their own."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=128,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts: list[str] = []
    async for chunk in stream:
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            cached = details.cached_tokens if details is not None else 0
            sys.stdout.write(
                f"[{index}] {''.join(parts)}\n"
                f"[{index}] {chunk.usage.completion_tokens} tokens, "
                f"{cached} of {chunk.usage.prompt_tokens} prompt tokens from the cache\n"
            )
        for choice in chunk.choices:
            reasoning = getattr(choice.delta, "reasoning_content", None)
            parts.append(reasoning or choice.delta.content or "")


async def main() -> None:
    """Ask everything at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("questions", nargs="*", default=["What is a radix tree?", "And a heap?"])
    options = parser.parse_args()
    async with AsyncOpenAI(base_url=f"{options.base_url}/v1", api_key=options.api_key) as client:
        model = (await client.models.list()).data[0].id
        await asyncio.gather(
            *(ask(client, model, i, question) for i, question in enumerate(options.questions))
        )


if __name__ == "__main__":
    asyncio.run(main())
