"""What an answer says about itself: usage, finish reason, fingerprint, and the error a request ends in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsserve.errors import Cancelled, DeadlineExceeded, DsserveError, EngineFault, Overloaded
from dsserve.protocol.engine import FinishCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(slots=True)
class TokenCounts:
    """Tokens of one choice.

    Attributes:
        prompt: Length of the prompt.
        cached: Part of the prompt whose KV was reused; replayed rows count as cached.
        completion: Tokens generated, a stop token included.
        reasoning: Part of `completion` that was thinking.
        accepted: Part of `completion` that was drafted; None on a server without drafts.
        rejected: Other draft tokens that were verified.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    accepted: int | None = None
    rejected: int = 0


def usage(choices: Iterable[TokenCounts], *, num_prompts: int = 1) -> dict[str, Any]:
    """Return the `usage` object of an answer.

    Args:
        choices: Counts of all choices, those of one prompt next to each other.
        num_prompts: Prompts of the request; a prompt counts once, however many choices it has, and
            what is reported as cached is what its first choice found.
    """
    counts = list(choices)
    firsts = counts[:: max(1, len(counts) // max(1, num_prompts))]
    prompt = sum(choice.prompt for choice in firsts)
    cached = sum(choice.cached for choice in firsts)
    completion = sum(choice.completion for choice in counts)
    details = {"reasoning_tokens": sum(choice.reasoning for choice in counts)}
    if any(choice.accepted is not None for choice in counts):
        # What a stop string cut off may have been drafted; it is no part of the completion.
        accepted = [min(choice.accepted or 0, choice.completion) for choice in counts]
        details["accepted_prediction_tokens"] = sum(accepted)
        details["rejected_prediction_tokens"] = sum(choice.rejected for choice in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": details,
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }


def finish_reason(code: int) -> str:
    """Return OpenAI's word for a finish code that is no error, or that came after some output.

    Raises:
        DsserveError: If the code is an error.
    """
    error = finish_error(code, output_len=1)
    if error is not None:
        raise error
    if code == FinishCode.LENGTH:
        return "length"
    if code in (FinishCode.ABORT, FinishCode.DEADLINE):
        return "abort"
    return "stop"


def finish_error(code: int, *, output_len: int) -> DsserveError | None:
    """Return the error that a finish code stands for, if it stands for one.

    Past its deadline a request ends with what there is: that is an error only without output.
    """
    match code:
        case FinishCode.ERROR_NAN:
            return EngineFault(
                "the model produced values that are not numbers", code="nan_detected"
            )
        case FinishCode.ERROR_POOL:
            return EngineFault(
                "the KV pools cannot hold this request any longer; use a larger "
                "--max-total-tokens or ask for fewer tokens",
                code="pool_exhausted",
            )
        case FinishCode.ERROR_INTERNAL:
            return EngineFault("the engine failed on this request", code="internal_error")
        case FinishCode.DEADLINE if output_len == 0:
            return DeadlineExceeded("the request's deadline passed before its first token")
        case FinishCode.DROPPED:
            return Overloaded(
                "the queue is full and a more urgent request took this one's place; try later",
                retry_after_s=1,
            )
    return None


def aborted_error() -> Cancelled:
    """Return the error for a request that somebody aborted."""
    return Cancelled("the request was aborted")


def system_fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a name for everything that decides what a seed produces: weights and numerics."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]
