"""Words, names and values of an open vocabulary; a string belongs to training or to evaluation by its hash.

Every open draw goes through `Lexicon`, so no held-out string is ever a name, key, value or identifier in training.
"""

from __future__ import annotations

import json
import string
import zlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

#: One string in so many is held out for evaluation.
HELD_OUT_SHARE = 12
_ONSETS: tuple[str, ...] = (
    *"bcdfghjklmnprstvwz",
    *[
        "bl",
        "br",
        "ch",
        "cl",
        "cr",
        "dr",
        "fl",
        "fr",
        "gl",
        "gr",
        "pl",
        "pr",
        "sh",
        "sk",
        "sl",
        "sm",
        "sn",
        "sp",
        "st",
        "th",
        "tr",
    ],
)
_VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ee", "oo", "ou"]
_CODAS = ["n", "r", "l", "s", "t", "m", "d", "k", "x", "nd", "rt", "st", "ck"]
_ACCENTED = "áàâäãåéèêëíìîïóòôöõúùûüçñøßšžćł"
_CHINESE = (
    "天地人日月水火山石田木禾米竹马牛羊鱼鸟虫花草叶果东西南北上下左右大小多少高低长短春夏秋冬"
    "红黄蓝绿白黑金银铜铁江河湖海云雨风雪电光明暗早晚今明年时分王李张刘陈杨赵黄周吴徐孙胡朱林何郭罗"
    "梁宋郑谢韩唐冯于董萧程曹袁邓许傅沈曾彭吕学校书本笔纸门窗车船路桥城市村家房屋茶饭菜酒糖心手足"
    "头目口耳安平和乐文武国民世界新旧好美真善龙虎凤梅兰菊松柏星辰"
)
_EXTENSIONS = ["txt", "csv", "json", "md", "py", "log", "png", "pdf", "toml", "yaml"]
_DOMAINS = ["com", "org", "net", "io", "dev"]
#: Of the names in training, so many are common ones.
_COMMON_SHARE = 0.12
_FIRST_NAMES = (
    "Peter", "Anna", "Maria", "John", "Paul", "Emma", "Lucas", "Sophie", "Thomas", "Julia", "Zachary", "Alice", "Bob", "Carol",
    "David", "Eve", "Frank", "Grace", "Heidi", "Ivan", "Jane", "Kate", "Laura", "Michael", "Nina", "Oliver", "Rachel", "Sarah",
    "Simon", "Tim", "Victor", "Wendy", "Xavier", "Yuki", "Zoe", "Mary", "James", "Robert", "Linda", "William", "Susan",
    "Richard", "Jessica", "Joseph", "Karen", "Daniel", "Nancy", "Mark", "Lisa", "George", "Helen", "Li Wei", "Ahmed", "Fatima",
)  # fmt: skip
_CITIES = (
    "Hamburg", "Berlin", "Paris", "London", "Rome", "Madrid", "Lisbon", "Vienna", "Zurich", "Munich", "Oslo", "New York", "Boston",
    "Chicago", "Tokyo", "Beijing", "Shanghai", "Delhi", "Sydney", "Toronto", "Cairo", "Lima", "Dublin", "Prague", "Warsaw", "Milan",
    "San Francisco", "Los Angeles", "Seattle", "Hangzhou", "Singapore", "Seoul", "Athens", "Moscow", "Istanbul", "Amsterdam",
)  # fmt: skip
_PHRASES = (
    "hello world", "Hello World", "hello", "good morning", "this is a test", "the quick brown fox", "foo bar", "I am here",
    "the cat sleeps", "one two three", "nice to meet you", "hello there", "thank you very much", "the sun is shining",
    "a small house", "good night", "my first test", "lorem ipsum", "to be or not to be", "hello everybody",
)  # fmt: skip
_TOKENIZER_FILE = Path(__file__).parents[1] / "tokenizer.json"
_WORDS_FILE = Path(__file__).with_name("words.txt")


@cache
def common_words() -> tuple[str, ...]:
    """English words of the general list, in the order of the file."""
    return tuple(_WORDS_FILE.read_text(encoding="utf-8").split())


@cache
def vocabulary_words() -> tuple[str, ...]:
    """Words of two letters and more that are one token behind a space: how they are spelled can only be learnt."""
    tokenizer = json.loads(_TOKENIZER_FILE.read_text(encoding="utf-8"))
    words = (token[1:] for token in tokenizer["model"]["vocab"] if token.startswith("Ġ"))
    return tuple(word for word in words if len(word) > 1 and word.isascii() and word.isalpha())


def is_held_out(text: str) -> bool:
    """Whether a string is kept for evaluation (case and ends do not matter)."""
    return zlib.crc32(text.strip().casefold().encode()) % HELD_OUT_SHARE == 0


class Lexicon:
    """Draws strings of one split.

    Attributes:
        rng: Source of all randomness; also used by the task generators.
        held_out: Whether strings come from the held-out part.
        excluded: Strings never drawn (in lower case).
    """

    def __init__(
        self, rng: Random, *, held_out: bool, excluded: frozenset[str] = frozenset()
    ) -> None:
        self.rng, self.held_out, self.excluded = rng, held_out, excluded

    def accepts(self, text: str) -> bool:
        """Whether a string belongs to this split."""
        return is_held_out(text) == self.held_out and text.casefold() not in self.excluded

    def draw(self, make: Callable[[], str]) -> str:
        """Call `make` until its string belongs to this split."""
        while True:
            text = make()
            if self.accepts(text):
                return text

    def word(self) -> str:
        """A lower-case word, half of them English, half made of syllables."""
        return self.draw(self._word)

    def english(self) -> str:
        """A word of the general list."""
        return self.draw(lambda: self.rng.choice(common_words()))

    def pseudo(self) -> str:
        """A word of syllables that no list holds."""
        return self.draw(self._pseudo)

    def spelled(self) -> str:
        """A word whose letters matter: any word, or one of the vocabulary (a closed list, the same in both splits)."""
        if self.rng.random() < 0.35:
            return self.rng.choice(vocabulary_words())
        return self.word()

    def name(self) -> str:
        """A name of a person or place."""
        if not self.held_out and self.rng.random() < _COMMON_SHARE:
            return self.draw(lambda: self.rng.choice(_FIRST_NAMES))
        return self.draw(
            lambda: self._pseudo().capitalize() if self.rng.random() < 0.8 else self._accented()
        )

    def city(self) -> str:
        """A name of a place, sometimes of two words."""
        if not self.held_out and self.rng.random() < _COMMON_SHARE:
            return self.draw(lambda: self.rng.choice(_CITIES))
        first = self.name()
        return first if self.rng.random() < 0.8 else f"{first} {self.name()}"

    def chinese(self, low: int = 1, high: int = 3) -> str:
        """Chinese characters."""
        return self.draw(
            lambda: "".join(self.rng.choice(_CHINESE) for _ in range(self.rng.randint(low, high)))
        )

    def identifier(self) -> str:
        """An identifier as programs have them."""
        return self.draw(self._identifier)

    def phrase(self) -> str:
        """What people type when they try a model, or two to four words."""
        if self.rng.random() < 0.5:
            return self.rng.choice(_PHRASES)
        return " ".join(self.word() for _ in range(self.rng.randint(2, 4)))

    def sentence(self) -> str:
        """Four to fourteen words as a sentence, or without its capital and full stop."""
        words = [
            self.english() if self.rng.random() < 0.8 else self.word()
            for _ in range(self.rng.randint(4, 14))
        ]
        if self.rng.random() < 0.3:
            words[0] = "the"
        text = " ".join(words)
        if self.rng.random() < 0.7:
            text = text[0].upper() + text[1:]
        return text + self.rng.choice((".", ".", "", "!", "?"))

    def number(self, low: int = 1, high: int = 5) -> str:
        """A number of `low` to `high` digits, every count of digits equally likely; any split."""
        digits = self.rng.randint(low, high)
        return str(self.rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits))

    def code(self) -> str:
        """A code of letters and digits, or hexadecimal digits."""
        return self.draw(self._code)

    def special(self) -> str:
        """A file name, mail address, web address, path or version."""
        return self.draw(self._special)

    def value(self) -> str:
        """Any value a key can have."""
        kind = self.rng.random()
        if kind < 0.35:
            return self.number(2, 5)
        if kind < 0.5:
            return self.word()
        if kind < 0.6:
            return f"{self.word()} {self.word()}"
        if kind < 0.72:
            return self.code()
        if kind < 0.82:
            return self.name()
        if kind < 0.9:
            return self.special()
        return self.identifier() if kind < 0.96 else self.chinese(1, 3)

    def text_value(self) -> str:
        """A value that cannot be taken for a number."""
        while True:
            value = self.value()
            if not value.isdigit():
                return value

    def value_code(self) -> str:
        """A number or code, as secrets are."""
        return self.number(3, 6) if self.rng.random() < 0.6 else self.code()

    def key(self) -> str:
        """Any key."""
        kind = self.rng.random()
        if kind < 0.45:
            return self.word()
        if kind < 0.7:
            return self.identifier()
        if kind < 0.8:
            return f"{self.word()} {self.word()}"
        if kind < 0.9:
            return self.name()
        return self.code() if kind < 0.95 else self.chinese(1, 2)

    def item(self) -> str:
        """An item of a list: a word, now and then something else."""
        kind = self.rng.random()
        if kind < 0.7:
            return self.word()
        return self.name() if kind < 0.9 else self.identifier()

    def distinct(self, make: Callable[[], str], count: int) -> list[str]:
        """`count` different strings."""
        found: dict[str, None] = {}
        while len(found) < count:
            found.setdefault(make(), None)
        return list(found)

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self.rng.random() < probability

    def pick(self, *options: str) -> str:
        """One of the options."""
        return self.rng.choice(options)

    def _word(self) -> str:
        return self.rng.choice(common_words()) if self.rng.random() < 0.5 else self._pseudo()

    def _syllable(self) -> str:
        rng = self.rng
        coda = rng.choice(_CODAS) if rng.random() < 0.4 else ""
        return rng.choice(_ONSETS) + rng.choice(_VOWELS) + coda

    def _pseudo(self) -> str:
        return "".join(self._syllable() for _ in range(self.rng.choice((1, 2, 2, 2, 3))))

    def _accented(self) -> str:
        letters = list(self._pseudo())
        letters[self.rng.randrange(len(letters))] = self.rng.choice(_ACCENTED)
        return "".join(letters).capitalize()

    def _identifier(self) -> str:
        parts = [self._word() for _ in range(self.rng.choice((1, 2, 2, 3)))]
        style = self.rng.random()
        if style < 0.5:
            text = "_".join(parts)
        elif style < 0.7:
            text = parts[0] + "".join(part.capitalize() for part in parts[1:])
        elif style < 0.85:
            text = "-".join(parts)
        else:
            text = "_".join(parts).upper()
        return text if self.rng.random() < 0.8 else text + str(self.rng.randrange(100))

    def _code(self) -> str:
        rng = self.rng
        style = rng.random()
        if style < 0.4:
            left = rng.choice(string.ascii_uppercase) + str(rng.randrange(10, 100))
            return f"{left}-{rng.choice(string.ascii_uppercase)}{rng.randrange(10, 100)}"
        if style < 0.7:
            return f"{rng.randrange(16**6):06x}"
        return "".join(
            rng.choice(string.ascii_letters + string.digits) for _ in range(rng.randint(4, 7))
        )

    def _special(self) -> str:
        rng = self.rng
        style = rng.random()
        first, second = self._word(), self._word()
        if style < 0.3:
            return (
                f"{first}_{second}.{rng.choice(_EXTENSIONS)}"
                if rng.random() < 0.5
                else f"{first}.{rng.choice(_EXTENSIONS)}"
            )
        if style < 0.5:
            return f"{first}@{second}.{rng.choice(_DOMAINS)}"
        if style < 0.7:
            return f"https://{first}.{rng.choice(_DOMAINS)}/{second}"
        if style < 0.85:
            return f"/{first}/{second}/{self._word()}"
        return f"v{rng.randrange(10)}.{rng.randrange(20)}.{rng.randrange(20)}"
