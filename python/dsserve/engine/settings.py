"""How do the server's options and the model become the scheduler's configuration?"""

from typing import Any

from dsserve.config.model import ModelConfig
from dsserve.config.server import ServerConfig

MAX_STEPS_IN_FLIGHT = 2
"""One running and one waiting behind it (`serving.md` a.10)."""


def scheduler_config(server: ServerConfig, model: ModelConfig, *, num_pages: int) -> dict[str, Any]:
    """Build the scheduler's configuration from a resolved server configuration."""
    return {
        "page_size": server.page_size,
        "num_pages": num_pages,
        "max_running_requests": server.max_running_requests,
        "max_queued_requests": server.max_queued_requests,
        "chunked_prefill_size": server.chunked_prefill_size,
        "max_prefill_tokens": server.max_prefill_tokens,
        "prefill_max_requests": server.prefill_max_requests,
        "prefill_max_defer": server.prefill_max_defer,
        "context_length": server.context_length,
        "window": model.sliding_window,
        "vocab_size": model.vocab_size,
        "encoder_replay": bool(server.enable_encoder_swa_bounded_replay),
        "decoder_replay": bool(server.enable_decoder_swa_bounded_replay),
        "radix_cache": not server.disable_radix_cache,
        "eviction_policy": server.radix_eviction_policy,
        "policy": server.schedule_policy,
        "policy_seed": server.random_seed or 0,
        "max_overtake": server.max_overtake,
        "inbatch_prefix_hold": server.inbatch_prefix_hold,
        "priority": {
            "enabled": server.enable_priority_scheduling,
            "low_values_first": server.schedule_low_priority_values_first,
            "preemption": not server.disable_priority_preemption,
            "preemption_threshold": server.priority_scheduling_preemption_threshold,
            "refuse_when_disabled": server.abort_on_priority_when_disabled,
        },
        "fair": server.fair_by != "none",
        "waiting_timeout_us": _timeout_us(server.request_waiting_timeout),
        "running_timeout_us": _timeout_us(server.request_running_timeout),
        "retraction_policy": server.retraction_policy,
        "mixed_chunk": server.enable_mixed_chunk,
        "prefill_decode_interval": server.prefill_decode_interval,
        "overlap_prefills": not server.disable_consecutive_prefill_overlap,
        "conservativeness": server.schedule_conservativeness,
        "max_steps_in_flight": MAX_STEPS_IN_FLIGHT,
        "draft_len": draft_len(server),
        "stateful_ratio": model.stateful_ratio,
        "eos_token_ids": list(model.eos_token_ids),
    }


def draft_len(server: ServerConfig) -> int:
    """Drafts behind the anchor in a resolved configuration; 0 without speculation."""
    num_tokens = server.speculative_num_draft_tokens
    return 0 if server.speculative_algorithm == "none" or num_tokens is None else num_tokens - 1


def most_request_tokens(server: ServerConfig, num_tokens: int) -> int:
    """Tokens of prompt and output that a request may have at most, in a pool of `num_tokens`.

    The last token is never computed; steps in flight may write drafts behind it.
    """
    drafts = draft_len(server)
    return num_tokens + 1 - (MAX_STEPS_IN_FLIGHT * (drafts + 1) if drafts else 0)


def _timeout_us(timeout_s: float) -> int | None:
    """Microseconds; a negative timeout is none."""
    return None if timeout_s < 0 else int(timeout_s * 1e6)
