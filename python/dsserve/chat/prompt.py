"""A conversation to prompt ids, and which ids of the vocabulary control a chat."""

import logging

from deepseek_recipe import (
    Conversation,
    DeepseekV4Encoding,
    DeepseekV41Encoding,
    SpecialToken,
    Tokenizer,
)

from dsserve import _native
from dsserve.chat.settings import ChatSettings
from dsserve.errors import ConfigError, Unsupported
from dsserve.protocol.engine import unpack_u32

logger = logging.getLogger(__name__)

_TEXT_TOKENS = (
    SpecialToken.Bos,
    SpecialToken.Eos,
    SpecialToken.User,
    SpecialToken.Assistant,
    SpecialToken.ThinkingStart,
    SpecialToken.ThinkingEnd,
    SpecialToken.Dsml,
    SpecialToken.LatestReminder,
)
_PARSED_TOKENS = (SpecialToken.ThinkingStart, SpecialToken.ThinkingEnd, SpecialToken.Dsml)


class PromptEncoder:
    """Encodes conversations with the recipe's encoding of the model version.

    The recipe renders the text. Its own `encode` is the reference for the ids, and used with the
    tokenizer backend `huggingface`; the fast backend gives the same ids, and keeps those of messages
    it saw before.

    Attributes:
        recipe_tokenizer: For the recipe's stream processors.
        missing_tokens: Special tokens of the encoding that the vocabulary lacks. They are then
            encoded as plain text, and what the model writes in their place is not parsed.
        thinking_end_id: Token that ends reasoning, if there is one.
        plain_special_ids: Special tokens that mean nothing to the parser of a reply.
    """

    def __init__(self, settings: ChatSettings, tokenizer: _native.Tokenizer | None) -> None:
        path = settings.tokenizer_path
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            self._native = tokenizer or _native.Tokenizer(path)
            self.recipe_tokenizer = Tokenizer.from_file(str(path))
        except (ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"cannot load the tokenizer {path}: {error}") from error
        is_v41 = settings.model_version == "v4.1"
        self._encoding: DeepseekV4Encoding | DeepseekV41Encoding = (
            DeepseekV41Encoding().with_tokenizer(self.recipe_tokenizer)
            if is_v41
            else DeepseekV4Encoding().with_tokenizer(self.recipe_tokenizer)
        )
        spellings = [token.default_str() for token in _TEXT_TOKENS]
        if is_v41:
            spellings.append(SpecialToken.System.default_str())
        find_id = self._native.added_token_to_id
        self.missing_tokens = tuple(spelling for spelling in spellings if find_id(spelling) is None)
        self.thinking_end_id = find_id(SpecialToken.ThinkingEnd.default_str())
        parsed_ids = {find_id(token.default_str()) for token in _PARSED_TOKENS}
        self.plain_special_ids = frozenset(self._native.special_ids) - parsed_ids
        if self.missing_tokens:
            logger.warning(
                "%s lacks %s: encoded as plain text, not recognised in replies",
                path,
                ", ".join(self.missing_tokens),
            )

    def encode(self, conversation: Conversation) -> list[int]:
        """Return the prompt ids of a conversation.

        Raises:
            Unsupported: It holds images.
        """
        if any(message.image_sources for message in conversation.messages):
            raise Unsupported("images do not work yet", param="messages")
        if self._native.backend == "huggingface" and not self.missing_tokens:
            return self._encoding.encode(conversation)
        rendered = self._encoding.render_conversation(conversation)
        ids = self._native.encode_rendered(rendered.prompt, rendered.special_ranges)
        return unpack_u32(ids)
