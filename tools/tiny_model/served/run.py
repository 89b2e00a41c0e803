"""Runs the rows of the table, server by server."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tools.tiny_model.acceptance import AcceptanceMeter, accept_lengths
from tools.tiny_model.render import Renderer, Settings
from tools.tiny_model.scoring import EVAL_SEED
from tools.tiny_model.served.cases import Case, build_cases, has_ended, parses
from tools.tiny_model.served.client import ask_all
from tools.tiny_model.served.contexts import hit_chain, longest_reply
from tools.tiny_model.served.pressure import Pressed, ask_pressed, server_flags
from tools.tiny_model.served.results import Answered, Findings, Result, Wrong
from tools.tiny_model.served.rows import Kind, RowSpec
from tools.tiny_model.served.server import read_counter, running_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_IN_FLIGHT = 8
#: Pages of this size let a context of 256 tokens be found again beyond the window.
_HIT_FLAGS = ("--page-size", "16")
_RETRACTIONS = "dsserve_num_retracted_reqs_total"
#: The engine reports its counters about once a second.
_REPORT_S = 3.0
#: Rows served after retraction take so many examples of each they are compared with.
_PRESSED_SHARE = 2
_ACCEPT_SHARE = 2
_EFFORTS = ("low", "high", "max")
_EFFORT_DATA = ("counting", "date", "units", "only-answer", "facts", "itself", "client", "strings")


@dataclass(slots=True)
class Runner:
    """One evaluation.

    Attributes:
        checkpoint: Folder of the checkpoint.
        count: Examples per row.
        seed: Of the draw of held-out examples.
        findings: What was found so far.
    """

    checkpoint: Path
    count: int
    seed: int = EVAL_SEED
    findings: Findings = field(default_factory=Findings)
    _renderer: Renderer = field(init=False)
    _answers: dict[str, list[Answered]] = field(default_factory=dict)
    _plain: dict[str, list[Answered]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._renderer = Renderer(self.checkpoint / "tokenizer.json")

    def run(self, specs: Sequence[RowSpec]) -> Iterator[Result]:
        """Score the rows, in an order that needs few servers; every row comes when it is ready."""
        kinds = {kind: [spec for spec in specs if spec.kind is kind] for kind in Kind}
        with running_server(self.checkpoint) as url:
            for spec in kinds[Kind.ANSWER]:
                yield self._answer(url, spec)
            for spec in kinds[Kind.PARSES]:
                yield self._parse(spec)
            for spec in kinds[Kind.EFFORT]:
                yield self._effort(url, spec)
            for spec in kinds[Kind.AFTER_RETRACTION]:
                cases = [case for case, _ in self._pressed(spec)]
                self._plain[spec.name] = self._ask(url, cases)
        for spec in (*kinds[Kind.THINKING], *kinds[Kind.ENDS]):
            yield self._format(spec)
        if kinds[Kind.AFTER_HIT]:
            with running_server(self.checkpoint, _HIT_FLAGS) as url:
                for spec in kinds[Kind.AFTER_HIT]:
                    yield self._after_hit(url, spec)
        for spec in kinds[Kind.AFTER_RETRACTION]:
            yield self._after_retraction(spec)
        yield from self._accept([*kinds[Kind.ACCEPT_MEAN], *kinds[Kind.ACCEPT_LEAST]])

    def _ask(self, url: str, cases: Sequence[Case]) -> list[Answered]:
        replies = ask_all(url, [[case.body()] for case in cases], in_flight=_IN_FLIGHT)
        answered = [Answered(case, reply) for case, reply in zip(cases, replies, strict=True)]
        self.findings.answered += answered
        return answered

    def _answer(self, url: str, spec: RowSpec) -> Result:
        began = time.monotonic()
        answered = self._ask(url, build_cases(self._renderer, spec.data, self.count, self.seed))
        self._answers[spec.name] = answered
        note = f"{time.monotonic() - began:.0f} s"
        return self.findings.add_answers(spec, answered, note=note)

    def _parse(self, spec: RowSpec) -> Result:
        answered = self._answers[spec.data]
        bad = [each for each in answered if not parses(each.reply.content)]
        return self._share(spec, answered, bad, "no JSON object")

    def _format(self, spec: RowSpec) -> Result:
        """Reasoning, or the end, of all answers of the run."""
        answered = self.findings.answered
        if spec.kind is Kind.THINKING:
            bad = [each for each in answered if not each.case.is_formatted(each.reply)]
        else:
            bad = [each for each in answered if not has_ended(each.reply)]
        return self._share(spec, answered, bad, spec.name)

    def _share(
        self, spec: RowSpec, answered: Sequence[Answered], bad: Sequence[Answered], fault: str
    ) -> Result:
        self.findings.wrong += [Wrong(spec.name, each.case, each.reply, fault) for each in bad]
        score = 1 - len(bad) / max(len(answered), 1)
        return self.findings.add(spec, len(answered), score)

    def _effort(self, url: str, spec: RowSpec) -> Result:
        """The same prompts with each effort: reasoning must not shrink, and must be longest with `max`."""
        each_count = -(-self.count // len(_EFFORT_DATA))
        cases = [
            case
            for name in _EFFORT_DATA
            for case in build_cases(self._renderer, name, each_count, self.seed)
        ]
        lengths: list[list[int]] = []
        for effort in _EFFORTS:
            asked = [
                replace(case, settings=Settings(True, effort, case.settings.system), max_tokens=400)
                for case in cases
            ]
            answered = self._ask(url, asked)
            lengths.append([each.reply.reasoning_tokens for each in answered])
        grows = [low <= high < most for low, high, most in zip(*lengths, strict=True)]
        means = [sum(length) / len(length) for length in lengths]
        note = "mean tokens " + " < ".join(
            f"{effort} {mean:.1f}" for effort, mean in zip(_EFFORTS, means, strict=True)
        )
        broken = "" if means[0] < means[1] < means[2] else f"not {note}"
        score = sum(grows) / len(cases)
        return self.findings.add(spec, len(cases), score, note=note, broken=broken)

    def _after_hit(self, url: str, spec: RowSpec) -> Result:
        """The question after another one about the same context."""
        before = self._answers[spec.data]
        chains = [(each, hit_chain(each.case)) for each in before]
        asked = [(each, chain) for each, chain in chains if chain is not None]
        replies = ask_all(url, [chain for _, chain in asked], in_flight=_IN_FLIGHT)
        pairs = [
            (each, Answered(each.case, reply))
            for (each, _), reply in zip(asked, replies, strict=True)
            if reply.cached_tokens > 0
        ]
        cached = sum(hit.reply.cached_tokens for _, hit in pairs) / max(len(pairs), 1)
        note = f"{len(pairs)} of {len(asked)} with a hit, mean {cached:.0f} tokens"
        broken = "" if 2 * len(pairs) > len(asked) else f"too few hits: {note}"
        return self._compare(spec, pairs, note, broken)

    def _after_retraction(self, spec: RowSpec) -> Result:
        """The question with the longest reply, against the same without pressure on the pool."""
        pressed = [each for _, each in self._pressed(spec)]
        with running_server(self.checkpoint, server_flags(pressed)) as url:
            replies = ask_pressed(url, pressed)
            time.sleep(_REPORT_S)
            count = read_counter(url, _RETRACTIONS)
        pairs = [
            (each, Answered(each.case, reply))
            for each, reply in zip(self._plain[spec.name], replies, strict=True)
        ]
        note = f"{count} retractions"
        broken = "" if 4 * count >= 3 * len(pairs) else f"too few retractions: {count}"
        return self._compare(spec, pairs, note, broken)

    def _pressed(self, spec: RowSpec) -> list[tuple[Case, Pressed]]:
        count = max(1, self.count // _PRESSED_SHARE)
        cases = build_cases(self._renderer, spec.data, count, self.seed)
        return [longest_reply(case, self._renderer) for case in cases]

    def _compare(
        self, spec: RowSpec, pairs: Sequence[tuple[Answered, Answered]], note: str, broken: str
    ) -> Result:
        base = sum(before.is_right for before, _ in pairs) / max(len(pairs), 1)
        after = [each for _, each in pairs]
        return self.findings.add_answers(spec, after, base=base, note=note, broken=broken)

    def _accept(self, specs: Sequence[RowSpec]) -> Iterator[Result]:
        if not specs:
            return
        meter = AcceptanceMeter.of_checkpoint(self.checkpoint)
        count = max(1, self.count // _ACCEPT_SHARE)
        table = accept_lengths(meter, self._renderer, count=count)
        mean = table.pop("all")
        least = min(table, key=lambda name: table[name])
        for spec in specs:
            is_mean = spec.kind is Kind.ACCEPT_MEAN
            note = f"{count} examples a task" if is_mean else least
            score = mean if is_mean else table[least]
            yield self.findings.add(spec, count * len(table), score, note=note)
