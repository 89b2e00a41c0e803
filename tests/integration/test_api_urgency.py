"""Priorities, deadlines and queue limits as clients see them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from api_errors import check_error

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

    from api_server import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [40, 41, 42]
STEP_MS = 20


class Call(threading.Thread):
    """A completion that runs beside the test."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        super().__init__()
        self._server = server
        self._body = {"prompt": PROMPT, "ignore_eos": True, "return_token_ids": True} | fields
        self.response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.response = self._server.post(COMPLETIONS, self._body)

    def result(self) -> httpx.Response:
        self.join(60)
        assert self.response is not None
        return self.response

    @property
    def is_over(self) -> bool:
        return not self.is_alive()


@pytest.fixture(scope="module")
def narrow_server(launch: Callable[..., ServerProcess]) -> ServerProcess:
    """One request at a time, steps that take a while, priorities."""
    flags = ["--max-running-requests", "1", "--max-queued-requests", "2"]
    flags += ["--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "5"]
    return launch(*flags, fake={"base_us": STEP_MS * 1000})


def test_urgent_request_passes_a_running_one_whose_output_stays_the_same(
    narrow_server: ServerProcess,
) -> None:
    body = {"prompt": PROMPT, "ignore_eos": True, "return_token_ids": True, "max_tokens": 60}
    alone = narrow_server.post(COMPLETIONS, body).json()["choices"][0]["token_ids"]
    slow = Call(narrow_server, max_tokens=60, priority=1)
    narrow_server.wait_running()
    urgent = Call(narrow_server, max_tokens=3, priority=20, prompt=[50, 51])
    assert urgent.result().status_code == 200
    assert not slow.is_over
    assert slow.result().json()["choices"][0]["token_ids"] == alone
    stats = narrow_server.state()["stats"]
    assert stats["preempted_total"] >= 1


def test_priority_within_the_threshold_waits(narrow_server: ServerProcess) -> None:
    before = narrow_server.wait_idle()["stats"]["preempted_total"]
    slow = Call(narrow_server, max_tokens=30, priority=1)
    narrow_server.wait_running()
    later = Call(narrow_server, max_tokens=2, priority=6)
    assert later.result().status_code == 200
    assert slow.is_over
    assert narrow_server.state()["stats"]["preempted_total"] == before


def test_full_queue_drops_the_least_urgent_for_a_more_urgent_request(
    narrow_server: ServerProcess,
) -> None:
    narrow_server.wait_idle()
    running = Call(narrow_server, max_tokens=60, priority=9)
    narrow_server.wait_running()
    dropped = Call(narrow_server, max_tokens=2)
    waiting = Call(narrow_server, max_tokens=2, priority=4)
    narrow_server.wait_running(3)
    equal = narrow_server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2})
    check_error(equal, 503, code="queue_full")
    urgent = Call(narrow_server, max_tokens=2, priority=5)
    check_error(dropped.result(), 503, code="queue_full")
    for call in (running, waiting, urgent):
        assert call.result().status_code == 200


def test_waiting_past_the_deadline_is_a_504_without_running(narrow_server: ServerProcess) -> None:
    narrow_server.wait_idle()
    running = Call(narrow_server, max_tokens=40, priority=9)
    narrow_server.wait_running()
    late = Call(narrow_server, max_tokens=2, priority=9, timeout_ms=3 * STEP_MS)
    check_error(late.result(), 504, code="deadline_exceeded")
    assert not running.is_over
    assert running.result().status_code == 200
    header = narrow_server.post(
        COMPLETIONS,
        {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "return_token_ids": True},
        headers={"x-dsserve-deadline-ms": str(8 * STEP_MS)},
    )
    choice = header.json()["choices"][0]
    assert choice["finish_reason"] == "abort", "what there is by then is the answer"
    assert 0 < len(choice["token_ids"]) < 50
    narrow_server.wait_idle()


def test_chat_past_its_deadline_ends_with_what_there_is(narrow_server: ServerProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 50,
        "ignore_eos": True,
        "timeout_ms": 8 * STEP_MS,
    }
    answer = narrow_server.post(CHAT, body).json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert 0 < answer["usage"]["completion_tokens"] < 50


def test_deadline_that_cannot_be_met_is_a_429_at_once(narrow_server: ServerProcess) -> None:
    narrow_server.wait_idle()
    running = Call(narrow_server, max_tokens=30, priority=9)
    narrow_server.wait_running()
    queued = Call(narrow_server, prompt=[60] * 400, max_tokens=2, priority=9)
    narrow_server.wait_running(2)
    refused = narrow_server.post(
        COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "timeout_ms": 50, "priority": 9}
    )
    check_error(refused, 429, code="deadline_unreachable")
    assert refused.headers["retry-after"] == "1"
    assert running.result().status_code == queued.result().status_code == 200


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"timeout_ms": 0}, {}, "timeout_ms"),
        ({"timeout_ms": "9"}, {}, "timeout_ms"),
        ({"priority": 2**31}, {}, "priority"),
        ({"priority": "high"}, {}, "priority"),
        ({"user": 7}, {}, "user"),
        ({}, {"x-dsserve-deadline-ms": "soon"}, "x-dsserve-deadline-ms"),
        ({}, {"x-dsserve-deadline-ms": "0"}, "x-dsserve-deadline-ms"),
        ({}, {"x-dsserve-deadline-ms": "0" * 19 + "1" + "9" * 20}, "x-dsserve-deadline-ms"),
        ({}, {"x-dsserve-deadline-ms": "0" * 19 + "1" + "9" * 400}, "x-dsserve-deadline-ms"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_out_of_range_are_a_400(
    narrow_server: ServerProcess, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    response = narrow_server.post(COMPLETIONS, {"prompt": PROMPT} | fields, headers=headers)
    check_error(response, 400, param=param)


def test_priority_is_refused_by_name_where_priorities_are_off(idle_server: ServerProcess) -> None:
    refused = idle_server.post(COMPLETIONS, {"prompt": PROMPT, "priority": 3})
    check_error(refused, 400, code="unsupported_parameter", param="priority")
    assert idle_server.post(COMPLETIONS, {"prompt": PROMPT, "priority": 0}).status_code == 200


def test_flags_of_fairness_timeouts_and_refused_priorities(
    launch: Callable[..., ServerProcess],
) -> None:
    flags = ["--fair-by", "user", "--abort-on-priority-when-disabled", "--allow-auto-truncate"]
    flags += ["--request-running-timeout", "0.3", "--schedule-policy", "hrrn"]
    flags += ["--context-length", "256", "--max-running-requests", "1"]
    server = launch(*flags, fake={"base_us": STEP_MS * 1000})
    refused = server.post(COMPLETIONS, {"prompt": PROMPT, "priority": 0})
    check_error(refused, 503, code="priority_disabled", param="priority")
    cut = server.post(COMPLETIONS, {"prompt": [45] * 400, "max_tokens": 2, "user": "ann"})
    assert cut.json()["usage"]["prompt_tokens"] == 254
    slow = server.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True})
    assert slow.json()["choices"][0]["finish_reason"] == "abort"
    server.wait_idle()
