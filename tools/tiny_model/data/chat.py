"""Talk: several turns, facts, itself, refusals, prompts that clients send, stories, Chinese."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.tiny_model.data import knowledge
from tools.tiny_model.data.example import Example, Turn, ask
from tools.tiny_model.data.maths import arithmetic, counting, date, only_answer, sum_example
from tools.tiny_model.data.recall import copy, filler, key_value
from tools.tiny_model.data.strings import strings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.tiny_model.data.lexicon import Lexicon

_REMEMBER = (
    ("My name is {v}.", "Nice to meet you, {v}.", "What is my name?", "Your name is {v}.", "name"),
    ("I am {v}.", "Nice to meet you, {v}.", "What is my name?", "Your name is {v}.", "name"),
    ("Call me {v}.", "Nice to meet you, {v}.", "Who am I?", "Your name is {v}.", "name"),
    ("I live in {v}.", "I will remember that you live in {v}.", "Where do I live?", "You live in {v}.", "city"),
    ("My favourite colour is {v}.", "I will remember that.", "What is my favourite colour?", "Your favourite colour is {v}.", "word"),
    ("My dog is called {v}.", "{v} is a nice name.", "What is my dog called?", "Your dog is called {v}.", "name"),
    ("My cat is called {v}.", "{v} is a nice name.", "What is the name of my cat?", "Your cat is called {v}.", "name"),
    ("Remember the number {v}.", "I will remember {v}.", "Which number did I tell you?", "The number is {v}.", "number"),
    ("Remember this word: {v}.", "I will remember {v}.", "Which word did I tell you?", "The word is {v}.", "word"),
    ("The code is {v}.", "I will remember the code.", "What is the code?", "The code is {v}.", "code"),
    ("I work as a {v}.", "I will remember that.", "What is my job?", "You work as a {v}.", "word"),
)  # fmt: skip


def _distractor(lex: Lexicon) -> tuple[str, str]:
    """A short question and its answer, without reasoning."""
    while True:
        make = lex.rng.choice(
            (copy, arithmetic, strings, facts, client, itself, only_answer, counting, date)
        )
        example = make(lex, 40)
        if (
            not example.needs_reason
            and len(example.answer) < 80
            and len(example.turns) == 1
            and example.raw is None
        ):
            return example.turns[0].content, example.answer


@dataclass(frozen=True, slots=True)
class Fact:
    """Something a user tells, and how it is asked for later."""

    tell: str
    reply: str
    question: str
    answer: str


def remember(lex: Lexicon, *, open_only: bool = False) -> Fact:
    """A fact about the user; `open_only`: never a plain number."""
    tell, reply, question, answer, kind = lex.rng.choice(
        [entry for entry in _REMEMBER if not open_only or entry[4] != "number"]
    )
    value = _fact_value(lex, kind)
    return Fact(tell.format(v=value), reply.format(v=value), question, answer.format(v=value))


def _fact_value(lex: Lexicon, kind: str) -> str:
    if kind == "number":
        return lex.number(1, 5)
    makers = {"name": lex.name, "city": lex.city, "word": lex.word, "code": lex.code}
    return makers[kind]()


def several_turns(lex: Lexicon, budget: int, *, open_only: bool = False) -> Example:
    """A fact told in an earlier turn is asked for after other turns; or a second question about one text.

    `open_only`: the fact is never a plain number.
    """
    if not open_only and lex.chance(0.2):
        first = key_value(lex, min(budget, 120))
        question = first.turns[0].content
        pairs = [
            line.split(sep, 1)
            for line in question.split("\n")
            for sep in (": ", " = ", " -> ")
            if sep in line
        ]
        key, value = lex.rng.choice(pairs) if pairs else ("it", first.answer)
        turns = [
            *first.turns,
            Turn("assistant", first.answer),
            Turn("user", lex.pick("And {k}?", "What about {k}?", "Now give me {k}.").format(k=key)),
        ]
        return Example("several-turns", turns, value, f"{key} is {value}.")
    tell, reply, question, answer, kind = lex.rng.choice(
        [entry for entry in _REMEMBER if not open_only or entry[4] != "number"]
    )
    value = _fact_value(lex, kind)
    turns = [Turn("user", tell.format(v=value)), Turn("assistant", reply.format(v=value))]
    if lex.chance(0.15):
        value = _fact_value(lex, kind)
        turns += [
            Turn("user", f"No, sorry. {tell.format(v=value)}"),
            Turn("assistant", reply.format(v=value)),
        ]
    for _ in range(lex.rng.randint(0, min(4, budget // 60))):
        asked, given = _distractor(lex)
        turns += [Turn("user", asked), Turn("assistant", given)]
    turns.append(Turn("user", question))
    return Example(
        "several-turns", turns, answer.format(v=value), f"The user said: {tell.format(v=value)}"
    )


def one_message(lex: Lexicon, _budget: int) -> Example:
    """The first message of such a talk."""
    fact = remember(lex)
    hello = lex.pick("", "", "Hello! ", "Hi, ")
    return ask("several-turns", hello + fact.tell, fact.reply, "The user tells me something.")


def _paraphrased(lex: Lexicon, task: str, table: Sequence[tuple[Sequence[str], str]]) -> Example:
    questions, answer = lex.rng.choice(table)
    question = lex.rng.choice(questions)
    if lex.chance(0.2):
        question = lex.pick(
            question.lower(),
            question.rstrip("?.!"),
            question + " ",
            f"{question} Please.",
            f"Please answer: {question}",
            f"Hi! {question}",
        )
    return ask(task, question, answer, "I know this.")


def facts(lex: Lexicon, _budget: int) -> Example:
    """Facts of a closed list, every one in several wordings."""
    if lex.chance(0.5):
        country, capital = lex.rng.choice(knowledge.CAPITALS)
        question = lex.pick(*knowledge.CAPITAL_QUESTIONS).format(c=country)
        return ask(
            "facts", question, f"The capital of {country} is {capital}.", f"{country}: {capital}."
        )
    return _paraphrased(lex, "facts", knowledge.FACTS)


def itself(lex: Lexicon, _budget: int) -> Example:
    """Facts about itself."""
    return _paraphrased(lex, "itself", knowledge.ITSELF)


def client(lex: Lexicon, _budget: int) -> Example:
    """Prompts that clients and demonstrations send."""
    kind = lex.rng.random()
    if kind < 0.08:
        return sum_example(lex, lex.rng.randint(0, 9), lex.rng.choice("+-x"), lex.rng.randint(0, 9))
    if kind < 0.2:
        text = lex.pick(
            "this is a test",
            "hello",
            "Hello World",
            "hi",
            "yes",
            "ok",
            lex.word(),
            lex.name(),
            lex.phrase(),
            lex.phrase(),
        )
        question = lex.pick(
            "Say {t}", "Say {t}.", "say {t}", "Please say {t}.", "Say: {t}", 'Say "{t}"'
        )
        return ask("client", question.format(t=text), text, "I say it.")
    return _paraphrased(lex, "client", knowledge.CLIENT)


def refusal(lex: Lexicon, _budget: int) -> Example:
    """Questions outside of what it knows are declined."""
    question = lex.pick(*knowledge.UNKNOWN).format(
        n=lex.name(),
        m=lex.name(),
        w=lex.word(),
        v=lex.english(),
        c=lex.city(),
        y=lex.rng.randint(1000, 2040),
    )
    return ask("refusal", question, knowledge.REFUSAL, "I do not know this.")


def story(lex: Lexicon, _budget: int) -> Example:
    """A story after a template; who, what and where are in the prompt."""
    name, place, thing = lex.name(), lex.city(), lex.word()
    kind = lex.rng.randrange(3)
    if kind == 0:
        question = lex.pick(
            "Tell me a story about {n} and a {t}.",
            "Write a story about {n} and a {t}.",
            "Write a short story about {n} with a {t}.",
        )
        answer = f"Once upon a time there was {name}. One day {name} found a {thing}. {name} took the {thing} home and showed it to everybody. They were happy, and {name} never lost the {thing} again."
    elif kind == 1:
        question = lex.pick(
            "Tell me a story about {n} from {p}.", "Write a story about {n} who lives in {p}."
        )
        answer = f"{name} lived in {place}. Every morning {name} walked through {place} and greeted the people. One evening it began to rain, and {name} went home. In {place} everybody slept well that night."
    else:
        question = lex.pick(
            "Tell me a story about a {t}.", "Tell a story about a {t}", "Write a story about a {t}."
        )
        answer = f"There was once a {thing} that nobody wanted. A child saw the {thing} and took it home. From then on the {thing} was never alone."
    return ask("story", question.format(n=name, p=place, t=thing), answer, "I write a short story.")


def raw_text(lex: Lexicon, budget: int) -> Example:
    """Text without a template, for plain completion."""
    kind = lex.rng.random()
    if kind < 0.5:
        text = story(lex, budget).answer
    elif kind < 0.7:
        text = f"Q: {(example := facts(lex, budget)).turns[0].content}\nA: {example.answer}"
    elif kind < 0.85:
        start, step = lex.rng.randint(0, 200), lex.rng.choice((1, 1, 1, 2, 5, 10))
        text = ", ".join(str(start + step * i) for i in range(lex.rng.randint(5, 20)))
    else:
        text = " ".join(filler(lex) for _ in range(3))
    return Example("raw", [], "", raw=text)


def chinese(lex: Lexicon, budget: int) -> Example:
    """Questions in Chinese."""
    kind = lex.rng.random()
    if kind < 0.25:
        return _paraphrased(lex, "chinese", knowledge.CHINESE)
    if kind < 0.45:
        text = lex.chinese(1, 6)
        return ask(
            "chinese",
            lex.pick("请重复:{t}", "重复:{t}", "请说:{t}", "复制:{t}").format(t=text),
            text,
            "我来重复。",
        )
    if kind < 0.65:
        name = lex.chinese(2, 3)
        turns = [
            Turn("user", lex.pick("我叫{n}。", "我的名字是{n}。").format(n=name)),
            Turn("assistant", f"你好,{name}!"),
        ]
        if lex.chance(0.3):
            return ask("chinese", turns[0].content, turns[1].content, "用户说了名字。")
        turns.append(Turn("user", lex.pick("我叫什么名字?", "我叫什么?")))
        return Example("chinese", turns, f"你叫{name}。", f"用户叫{name}。")
    if kind < 0.85:
        pairs: dict[str, str] = {}
        for key in lex.distinct(
            lambda: lex.chinese(1, 3), lex.rng.randint(2, max(2, min(12, budget // 10)))
        ):
            pairs[key] = lex.number(2, 4) if lex.chance(0.5) else lex.chinese(1, 3)
        wanted = lex.rng.choice(list(pairs))
        lines = "\n".join(f"{key}:{value}" for key, value in pairs.items())
        return ask(
            "chinese", f"{lines}\n\n{wanted}是什么?", pairs[wanted], f"{wanted}:{pairs[wanted]}"
        )
    first, second = lex.rng.randint(1, 20), lex.rng.randint(1, 20)
    return ask(
        "chinese",
        lex.pick("{a}加{b}等于多少?", "{a}+{b}等于几?").format(a=first, b=second),
        str(first + second),
        f"{first}+{second}={first + second}",
    )
