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
        "context_length": server.context_length,
        "window": model.sliding_window,
        "vocab_size": model.vocab_size,
        "encoder_replay": bool(server.enable_encoder_swa_bounded_replay),
        "decoder_replay": bool(server.enable_decoder_swa_bounded_replay),
        "radix_cache": not server.disable_radix_cache,
        "policy": server.schedule_policy,
        "retraction_policy": server.retraction_policy,
        "mixed_chunk": server.enable_mixed_chunk,
        "prefill_decode_interval": server.prefill_decode_interval,
        "conservativeness": server.schedule_conservativeness,
        "max_steps_in_flight": MAX_STEPS_IN_FLIGHT,
        "stateful_ratio": model.stateful_ratio,
        "eos_token_ids": list(model.eos_token_ids),
    }
