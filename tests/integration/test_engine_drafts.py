"""The step loop with drafts, over the fake model: every slot is checked, every id is known beforehand."""

from __future__ import annotations

import json
import logging
import random
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsserve import _native
from dsserve.config.model import load_model_config
from dsserve.engine.inbox import Inbox, LiveRequests
from dsserve.engine.loop import StepLoop
from dsserve.engine.outbox import Outbox
from dsserve.observe.log import StepLog
from dsserve.observe.metrics import Metrics
from dsserve.protocol import engine as wire
from dsserve.worker.fake import FakeWorker
from dsserve.worker.fake_model import FakeSettings, fake_output
from engine_process import MODEL_PATH
from fakes import StubSocket

if TYPE_CHECKING:
    from collections.abc import Callable

GAMMA, PAGE, WINDOW = 4, 16, 16
PATTERN = [0, 3, 1, 4, 2, 9]


class Run:
    """One run of the loop, from its first message to its end."""

    def __init__(
        self,
        requests: list[wire.EngineRequest],
        *,
        later: dict[int, Callable[[], wire.ToEngine]] | None = None,
        is_overlapped: bool = True,
        gamma: int = GAMMA,
        decode_interval: int = 1000,
        **config: Any,
    ) -> None:
        pattern = {"draft_accept": PATTERN} if gamma else {}
        model = load_model_config(MODEL_PATH, {"fake": pattern})
        self.scheduler = _native.Scheduler(
            json.dumps(
                {
                    "page_size": PAGE,
                    "num_pages": 200,
                    "max_running_requests": 12,
                    "chunked_prefill_size": 64,
                    "context_length": 256,
                    "window": WINDOW,
                    "vocab_size": 512,
                    "eos_token_ids": [1],
                    "draft_len": gamma,
                }
                | config
            )
        )
        capacity = {**self.scheduler.plan_capacity(), "page_size": PAGE}
        capacity["pages"] = config.get("num_pages", 200)
        worker = FakeWorker(model, capacity, context_length=256)
        self.scheduler.register_buffers(worker.buffer_sets())
        first: list[wire.ToEngine] = [wire.Hello(), wire.SubmitBatch(requests=requests)]
        self.socket_in = StubSocket([wire.encode(message) for message in first])
        self.socket_out = StubSocket()
        self.later, self._calls = later or {}, 0
        self.loop = StepLoop(
            scheduler=self.scheduler,
            worker=worker,
            inbox=Inbox(self.socket_in, clock=self._clock),
            outbox=Outbox(self.socket_out),
            requests=LiveRequests(has_scripts=True, draft_len=gamma),
            step_log=StepLog(decode_interval=decode_interval),
            is_overlapped=is_overlapped,
            draft_len=gamma,
            clock=self._clock,
        )
        try:
            self.loop.run()
        finally:
            worker.close()
        self.ids: dict[int, list[int]] = {}
        self.codes: dict[int, wire.FinishCode] = {}
        self.drafts: dict[int, tuple[int, int]] = {}
        self._read()

    def _clock(self) -> float:
        """Also hands over later messages, and in the end the shutdown."""
        self._calls += 1
        number = len([m for m in self.socket_out.sent if isinstance(m, wire.Outputs)])
        for due in [due for due in self.later if due <= number]:
            self.socket_in.frames.append(wire.encode(self.later.pop(due)()))
        if self._calls == 40:
            self.socket_in.frames.append(wire.encode(wire.Shutdown(grace_s=1e6)))
        return self._calls * 1e-3

    def _read(self) -> None:
        for message in self.socket_out.sent:
            if not isinstance(message, wire.Outputs):
                continue
            offsets = wire.unpack_u32(message.token_offsets)
            new = wire.unpack_u32(message.token_ids)
            accepted = wire.unpack_u32(message.accepted_drafts)
            rejected = wire.unpack_u32(message.rejected_drafts)
            for index, request_id in enumerate(wire.unpack_u64(message.request_ids)):
                ids = self.ids.setdefault(request_id, [])
                ids += new[offsets[index] : offsets[index + 1]]
                code = wire.FinishCode(message.finish_codes[index])
                if code is not wire.FinishCode.NONE:
                    self.codes[request_id] = code
                    del ids[wire.unpack_u32(message.output_lens)[index] :]
                if accepted:
                    self.drafts[request_id] = accepted[index], rejected[index]

    @property
    def stats(self) -> dict[str, Any]:
        beats = [m for m in self.socket_out.sent if isinstance(m, wire.Heartbeat)]
        return beats[-1].stats


def request(request_id: int, prompt: list[int], **fields: Any) -> wire.EngineRequest:
    values = {"token_ids": wire.pack_u32(prompt), "max_new_tokens": 30} | fields
    return wire.EngineRequest(request_id=request_id, **values)


def some_prompts(count: int, longest: int = 100) -> list[list[int]]:
    rng = random.Random(count)
    common = [rng.randrange(2, 500) for _ in range(64)]
    prompts = []
    for _ in range(count):
        own = [rng.randrange(2, 500) for _ in range(rng.choice([1, 2, 15, 16, 17, 40, longest]))]
        prompts.append(common + own if rng.random() < 0.3 else own)
    return prompts


def expected(prompt: list[int], count: int) -> list[int]:
    return fake_output(prompt, count, FakeSettings())


@pytest.mark.parametrize("is_overlapped", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"mixed_chunk": True},
        {"prefill_decode_interval": 2, "chunked_prefill_size": 32},
        {"max_running_requests": 3, "decoder_replay": False},
    ],
    ids=["default", "mixed", "interval", "few-slots"],
)
def test_drafts_change_no_token(config: dict[str, Any], is_overlapped: bool) -> None:
    prompts = some_prompts(24)
    run = Run(
        [request(i + 1, prompt, max_new_tokens=5 + i) for i, prompt in enumerate(prompts)],
        is_overlapped=is_overlapped,
        **config,
    )
    for i, prompt in enumerate(prompts):
        assert run.ids[i + 1] == expected(prompt, 5 + i)
        assert run.codes[i + 1] is wire.FinishCode.LENGTH
    assert run.stats["verify_steps_total"] > 0
    run.scheduler.check_invariants()


@pytest.mark.parametrize("is_overlapped", [True, False], ids=["overlap", "plain"])
def test_retraction_changes_no_token(is_overlapped: bool) -> None:
    """Requests that grow to twice the pool."""
    prompts = [prompt[:20] for prompt in some_prompts(8)]
    run = Run(
        [request(i + 1, prompt, max_new_tokens=60) for i, prompt in enumerate(prompts)],
        is_overlapped=is_overlapped,
        num_pages=20,
        conservativeness=0.01,
        radix_cache=True,
    )
    assert run.stats["retracted_total"] > 0
    for i, prompt in enumerate(prompts):
        assert run.ids[i + 1] == expected(prompt, 60)


def test_a_stop_token_inside_a_run_ends_it_there() -> None:
    prompts = some_prompts(16)
    requests, wanted = [], []
    for i, prompt in enumerate(prompts):
        output = expected(prompt, 30)
        stop = output[3 + i]
        requests.append(request(i + 1, prompt, stop_token_ids=wire.pack_u32([stop])))
        wanted.append(output[: output.index(stop) + 1])
    run = Run(requests)
    assert [run.ids[i + 1] for i in range(len(prompts))] == wanted
    assert set(run.codes.values()) == {wire.FinishCode.STOP_TOKEN}


def test_a_stop_string_inside_a_run_keeps_what_comes_before() -> None:
    prompt = some_prompts(3)[0]
    for kept in range(1, 9):
        finish = {3: lambda kept=kept: wire.Finish(request_id=1, kept_tokens=kept)}
        run = Run([request(1, prompt)], later=finish)
        assert run.ids[1] == expected(prompt, 30)[:kept]
        assert run.codes[1] is wire.FinishCode.STOP_STRING


def test_accepted_and_rejected_drafts_of_a_request_add_up() -> None:
    """Alone and without overlap the rounds can be counted by hand."""
    prompt, count = [5, 6, 7], 25
    run = Run([request(1, prompt, max_new_tokens=count)], is_overlapped=False)
    position, left = len(prompt), count - 1
    accepted = rejected = 0
    lengths = []
    while left:
        drafts = min(GAMMA, left - 1)
        taken = min(PATTERN[position % len(PATTERN)], drafts)
        if drafts:
            accepted, rejected = accepted + taken, rejected + drafts - taken
            lengths.append((drafts + 1, taken + 1))
        position, left = position + taken + 1, left - taken - 1
    assert run.ids[1] == expected(prompt, count)
    assert run.drafts[1] == (accepted, rejected)
    assert_metrics(run.stats, lengths)


def assert_metrics(stats: dict[str, Any], lengths: list[tuple[int, int]]) -> None:
    """Read every series of speculation back from the page that a scraper gets."""
    metrics = Metrics(model_name="m")
    metrics.update_engine(stats, max_tokens=1)
    values = {
        (sample.name, sample.labels.get("position") or sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }

    def value(name: str, label: str | None = None) -> float:
        return values[f"dsserve_{name}", label]

    verified = [verify - 1 for verify, _ in lengths]
    accepted = [accept - 1 for _, accept in lengths]
    assert value("spec_verify_calls_total") == len(lengths)
    assert value("spec_verified_tokens_total") == sum(verified)
    for position in range(1, GAMMA + 1):
        taken = sum(accept >= position for accept in accepted)
        assert value("spec_accepted_tokens_total", str(position)) == taken
    for name, column in (("spec_verify_len", 0), ("spec_accept_length", 1)):
        assert value(f"{name}_count") == len(lengths)
        assert value(f"{name}_sum") == sum(pair[column] for pair in lengths)
        for end in range(1, GAMMA + 2):
            below = sum(pair[column] <= end for pair in lengths)
            assert value(f"{name}_bucket", str(float(end))) == below
    assert value("spec_draft_tokens_total") >= sum(verified)


def test_the_line_of_decode_steps_tells_tokens_and_accept_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="dsserve"):
        run = Run(
            [request(1, [5, 6, 7], max_new_tokens=25)], is_overlapped=False, decode_interval=1
        )
    lines = [getattr(record, "fields", None) for record in caplog.records]
    steps = [line for line in lines if line and "accept_len" in line]
    assert sum(line["tokens"] for line in steps) == 24
    # A line without a verification (no drafts near the limit) tells 0.
    assert [line["accept_len"] or 1 for line in steps] == [line["tokens"] for line in steps]
    assert len(run.ids[1]) == 25


def test_requests_without_drafts_ride_along() -> None:
    prompts = some_prompts(6)
    run = Run(
        [request(i + 1, prompt, draft_len=(None, 0, 2)[i % 3]) for i, prompt in enumerate(prompts)]
    )
    for i, prompt in enumerate(prompts):
        assert run.ids[i + 1] == expected(prompt, 30)
        if i % 3 == 1:
            assert run.drafts[i + 1] == (0, 0)
        else:
            assert sum(run.drafts[i + 1]) > 0


def test_a_server_without_drafts_tells_nothing_of_them() -> None:
    run = Run([request(1, [5, 6, 7])], gamma=0)
    assert run.ids[1] == expected([5, 6, 7], 30)
    assert run.drafts == {}
    assert "speculation" not in run.stats


def test_a_broken_row_ends_its_request_only() -> None:
    script = {"script": {"nan_at": 7}}
    run = Run([request(1, [5, 6, 7], custom_params=script), request(2, [8, 9])])
    assert run.codes == {1: wire.FinishCode.ERROR_NAN, 2: wire.FinishCode.LENGTH}
    assert run.ids[2] == expected([8, 9], 30)
