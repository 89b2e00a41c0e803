"""Which prompts are still being handed over to the scheduler?

A prompt of a million tokens is 4 MB: to copy, check and look it up at once would hold a pass of the loop up
for milliseconds. So it goes over in parts, one a pass.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsserve.engine.scheduler_api import SchedulerApi

TOKENS_A_PASS = 131_072
"""Longer prompts are handed over in parts: so many tokens take about half a millisecond."""


@dataclass(slots=True)
class _Prompt:
    request_id: int
    rest: NDArray[np.uint32]


class PromptParts:
    """Prompts of which the scheduler has a part, oldest first."""

    def __init__(self) -> None:
        """Start empty."""
        self._prompts: deque[_Prompt] = deque()

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, spec: dict[str, Any]) -> bool:
        """Take the ids out of a request's spec if they are too many for one pass; say whether."""
        ids = np.frombuffer(spec["token_ids"], dtype="<u4")
        if ids.size <= TOKENS_A_PASS:
            return False
        spec["token_ids"] = b""
        spec["prompt_len"] = ids.size
        self._prompts.append(_Prompt(spec["request_id"], ids))
        return True

    def drop(self, request_ids: set[int]) -> None:
        """Forget prompts of requests that were refused or ended."""
        if self._prompts:
            kept = (prompt for prompt in self._prompts if prompt.request_id not in request_ids)
            self._prompts = deque(kept)

    def feed(self, scheduler: SchedulerApi) -> tuple[int | None, tuple[int, str, str] | None]:
        """Hand over the next part.

        Returns:
            The request whose prompt is whole now, if one is; and the refusal of one, if it is refused.
        """
        if not self._prompts:
            return None, None
        prompt = self._prompts[0]
        part, prompt.rest = prompt.rest[:TOKENS_A_PASS], prompt.rest[TOKENS_A_PASS:]
        refused = scheduler.extend_prompt(prompt.request_id, part)
        if refused is None and prompt.rest.size:
            return None, None
        self._prompts.popleft()
        return (prompt.request_id, None) if refused is None else (None, refused)
