"""Fields that clients of OpenAI, vLLM and SGLang know and that do not work here (yet): refused by name.

A value that asks for nothing (null, the default of the API it comes from) passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dsserve.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_YET: Final = "it does not work in this version yet"
_NO_GRAMMAR: Final = "constrained output does not work in this version yet"
_NO_LOGPROBS: Final = "log-probabilities do not work in this version yet"
_TEXT_ONLY: Final = "this server takes and returns text only"
_NO_STORE: Final = "this server stores no answers"
_NEVER: Final = "this server does not offer it"

# Field -> (values that ask for nothing, besides null; why anything else is refused).
COMMON: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    # Log-probabilities.
    "prompt_logprobs": ((), _NO_LOGPROBS),
    "return_logprob": ((False,), _NO_LOGPROBS),
    "logprob_start_len": ((-1,), _NO_LOGPROBS),
    "top_logprobs_num": ((0,), _NO_LOGPROBS),
    "token_ids_logprob": ((), _NO_LOGPROBS),
    "return_text_in_logprobs": ((False,), _NO_LOGPROBS),
    "return_tokens_as_token_ids": ((False,), _NO_LOGPROBS),
    "logprobs_mode": ((), _NO_LOGPROBS),
    # Constrained output.
    "response_format": (({"type": "text"},), _NO_GRAMMAR),
    "regex": ((), _NO_GRAMMAR),
    "ebnf": ((), _NO_GRAMMAR),
    "json_schema": ((), _NO_GRAMMAR),
    "structural_tag": ((), _NO_GRAMMAR),
    "structured_outputs": ((), _NO_GRAMMAR),
    "guided_json": ((), _NO_GRAMMAR),
    "guided_regex": ((), _NO_GRAMMAR),
    "guided_choice": ((), _NO_GRAMMAR),
    "guided_grammar": ((), _NO_GRAMMAR),
    "guided_decoding_backend": ((), _NO_GRAMMAR),
    "tool_grammar": ((), _NO_GRAMMAR),
    # Scheduling and routing.
    "data_parallel_rank": ((0,), _NOT_YET),
    "routed_dp_rank": ((0,), _NOT_YET),
    "service_tier": (("auto", "default"), _NEVER),
    "bootstrap_host": ((), _NOT_YET),
    "bootstrap_port": ((), _NOT_YET),
    "bootstrap_room": ((), _NOT_YET),
    "kv_transfer_params": ((), _NOT_YET),
    "session_params": ((), _NEVER),
    # Sampling and search.
    "use_beam_search": ((False,), _NEVER),
    "length_penalty": ((1, 1.0), _NEVER),
    "early_stopping": ((False,), _NEVER),
    "allowed_token_ids": ((), _NOT_YET),
    "bad_words": (([],), _NOT_YET),
    "logits_processors": (([],), _NEVER),
    "custom_logit_processor": ((), _NEVER),
    "vllm_xargs": (({},), _NEVER),
    "thinking_token_budget": ((), _NOT_YET),
    # Prompt and output forms.
    "truncate_prompt_tokens": ((), _NOT_YET),
    "prompt_embeds": ((), _NEVER),
    "input_embeds": ((), _NEVER),
    "input_ids": ((), "give token ids as 'prompt' to /v1/completions"),
    "lora_path": ((), _NEVER),
    "lora_request": ((), _NEVER),
    "return_hidden_states": ((False,), _NOT_YET),
    "return_routed_experts": ((False,), _NOT_YET),
    "spaces_between_special_tokens": ((True,), _NEVER),
    "detokenize": ((True,), "use 'return_token_ids'"),
    "image_data": ((), _TEXT_ONLY),
    "images": (([],), _TEXT_ONLY),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "store": ((False,), _NO_STORE),
}

COMPLETION: Final = COMMON | {
    "logprobs": ((), _NO_LOGPROBS),
    "top_logprobs": ((), _NO_LOGPROBS),
    "suffix": (("",), "the tokenizer defines no hole tokens"),
    "best_of": ((1,), "ask for 'n' answers and choose"),
    "max_completion_tokens": ((), "completions take 'max_tokens'"),
    "messages": ((), "use /v1/chat/completions"),
}

CHAT: Final = COMMON | {
    "stop_regex": ((), "only completions have stop patterns"),
    "logprobs": ((False,), _NO_LOGPROBS),
    "top_logprobs": ((0,), _NO_LOGPROBS),
    "best_of": ((1,), "ask for 'n' answers and choose"),
    "prompt": ((), "use /v1/completions, or 'messages'"),
    "suffix": ((), "the tokenizer defines no hole tokens"),
    "echo": ((False,), "only completions can echo the prompt"),
    "functions": ((), "use 'tools'"),
    "function_call": ((), "use 'tool_choice'"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "prediction": ((), _NEVER),
    "web_search_options": ((), _NEVER),
    "moderation": ((), _NEVER),
    "verbosity": (("medium",), _NEVER),
    "documents": ((), _NEVER),
    "chat_template": ((), "the conversation format is DeepSeek's own"),
    "add_special_tokens": ((False, True), _NEVER),
    "include_reasoning": ((True,), "use 'separate_reasoning' or 'stream_reasoning'"),
}


def refuse_unsupported(
    body: Mapping[str, Any], table: Mapping[str, tuple[tuple[Any, ...], str]]
) -> dict[str, Any]:
    """Return `body` without the fields of `table`.

    Raises:
        Unsupported: If one of them asks for something.
    """
    for name in table.keys() & body.keys():
        value = body[name]
        harmless, reason = table[name]
        if value is not None and not any(_is_same(value, other) for other in harmless):
            raise Unsupported(f"'{name}' is not supported: {reason}", param=name)
    return {name: value for name, value in body.items() if name not in table}


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)
