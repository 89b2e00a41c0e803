"""Builds the small byte-level tokenizer of tiny models from the text that the package ships.

Shape as released, spellings of DeepSeek's control tokens as deepseek-recipe has them (tiny-model.md section 3).
"""

from __future__ import annotations

import importlib.resources

from deepseek_recipe import SpecialToken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import processors as post_processors

from dsserve.errors import ConfigError

#: Ids 0, 1 and 2.
PAD_TOKEN = "<｜▁pad▁｜>"  # noqa: RUF001 - the released spelling
#: Fills the rows of a draft block behind its anchor.
NOISE_TOKEN = "<｜place▁holder▁no▁799｜>"  # noqa: RUF001 - the released spelling
_NUM_BYTES = 256
#: Words as the released tokenizer cuts them; digits singly, so that numbers have one spelling.
_DIGIT = r"\p{N}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WORD = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bos_token() -> str:
    """Return the spelling of the first token of every prompt."""
    return SpecialToken.Bos.default_str()


def eos_token() -> str:
    """Return the spelling of the token that ends an answer."""
    return SpecialToken.Eos.default_str()


def image_token() -> str:
    """Return the spelling of the token that stands for a piece of an image."""
    return SpecialToken.Image.default_str()


def build_tokenizer(vocab_size: int, text: str | None = None) -> Tokenizer:
    """Train a tokenizer with exactly `vocab_size` ids; the same every time.

    Ids: begin, end, pad; the 256 bytes; merges; last the added control tokens, the image token at the end.

    Args:
        vocab_size: At least the fixed tokens and bytes; at most what the text yields.
        text: What to train on; None = the text that the package ships.

    Raises:
        ConfigError: If the size is out of reach.
    """
    leading = [bos_token(), eos_token(), PAD_TOKEN]
    added = _added_tokens()
    num_trained = vocab_size - len(added)
    smallest = len(leading) + _NUM_BYTES
    if num_trained < smallest:
        raise ConfigError(
            f"a tokenizer needs at least {smallest + len(added)} ids, not {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.post_processor = post_processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_trained,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in leading],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    corpus = _corpus() if text is None else text
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    size = tokenizer.get_vocab_size()
    if size != num_trained:
        raise ConfigError(
            f"the text yields {size + len(added)} ids, not {vocab_size}: choose a smaller vocabulary"
        )
    tokenizer.add_tokens(added)
    return tokenizer


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a token.

    Raises:
        ConfigError: If the tokenizer has none of that spelling.
    """
    found = tokenizer.token_to_id(text)
    if found is None:
        raise ConfigError(f"the tokenizer has no token {text!r}")
    return found


def tokenizer_settings(context_length: int) -> dict[str, object]:
    """Return the `tokenizer_config.json` that goes with `build_tokenizer`."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": bos_token(),
        "eos_token": eos_token(),
        "pad_token": PAD_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _added_tokens() -> list[AddedToken]:
    """Return the last ids; as released, chat and thinking marks are text, the others are special."""
    visible = [
        SpecialToken.User,
        SpecialToken.Assistant,
        SpecialToken.ThinkingStart,
        SpecialToken.ThinkingEnd,
        SpecialToken.Dsml,
        SpecialToken.System,
        SpecialToken.LatestReminder,
    ]
    special = [
        SpecialToken.Ref,
        SpecialToken.RefEnd,
        SpecialToken.Box,
        SpecialToken.BoxEnd,
        SpecialToken.Point,
        SpecialToken.PointEnd,
        SpecialToken.Polygon,
        SpecialToken.PolygonEnd,
        SpecialToken.Image,
    ]
    return [
        AddedToken(NOISE_TOKEN, special=True, normalized=False),
        *(AddedToken(token.default_str(), special=False, normalized=False) for token in visible),
        *(AddedToken(token.default_str(), special=True, normalized=False) for token in special),
    ]


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in (_DIGIT, _CJK, _WORD)
    ]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _corpus() -> str:
    file = importlib.resources.files("dsserve") / "assets" / "corpus.txt"
    return file.read_text(encoding="utf-8")
