import logging

import msgspec
import pytest

from dsserve.engine.inbox import MAX_DRAIN_S, MAX_MESSAGES, Inbox, LiveRequests, ProtocolMismatch
from dsserve.errors import InvalidRequest
from dsserve.protocol import engine as wire
from fakes import StubSocket

HELLO = wire.encode(wire.Hello())
ABORT = wire.encode(wire.Abort(all=True))


def test_malformed_message_is_logged_and_dropped(caplog):
    inbox = Inbox(StubSocket([HELLO, b"\xc1 nonsense", ABORT]), clock=lambda: 0.0)
    with caplog.at_level(logging.ERROR):
        assert inbox.drain() == [wire.Abort(all=True)]
    assert "malformed" in caplog.text


def test_message_before_hello_is_logged_and_dropped(caplog):
    inbox = Inbox(StubSocket([ABORT, HELLO, ABORT]), clock=lambda: 0.0)
    with caplog.at_level(logging.ERROR):
        assert inbox.drain() == [wire.Abort(all=True)]
    assert "before any hello" in caplog.text


def test_hello_of_another_version_is_refused():
    frame = wire.encode(wire.Hello(protocol_version=wire.PROTOCOL_VERSION + 1))
    with pytest.raises(ProtocolMismatch, match="protocol version"):
        Inbox(StubSocket([frame]), clock=lambda: 0.0).drain()


def test_one_pass_takes_a_bounded_number_of_messages():
    socket = StubSocket([HELLO, *[ABORT] * (2 * MAX_MESSAGES)])
    assert len(Inbox(socket, clock=lambda: 0.0).drain()) == MAX_MESSAGES - 1
    assert len(socket.frames) == MAX_MESSAGES + 1


def test_one_pass_takes_a_bounded_time():
    ticks = iter(range(100))
    inbox = Inbox(StubSocket([HELLO, *[ABORT] * 10]), clock=lambda: next(ticks) * MAX_DRAIN_S / 4)
    assert len(inbox.drain()) == 4


def request(request_id=1, **fields):
    values = {"token_ids": wire.pack_u32([5, 6]), "max_new_tokens": 9, **fields}
    return wire.EngineRequest(request_id=request_id, **values)


def test_worker_learns_a_request_once_also_if_it_is_resumed():
    live = LiveRequests(has_scripts=True)
    live.add(request(stop_token_ids=wire.pack_u32([8]), custom_params={"script": {"ids": [4]}}))
    [admitted] = live.admit([1])
    assert admitted.prompt_token_ids.tolist() == [5, 6]
    assert admitted.stop_token_ids == (8,)
    assert admitted.script == wire.Script(ids=[4])
    assert live.admit([1]) == []
    assert live.remove([1]) == [1]
    assert len(live) == 0


def test_request_that_ended_before_it_ran_is_unknown_to_the_worker():
    live = LiveRequests(has_scripts=True)
    live.add(request())
    assert live.remove([1]) == []


@pytest.mark.parametrize(
    "params",
    [
        {"scripts": {}},
        {"script": {"ids": ["a"]}},
        {"script": {"ids": [-1]}},
        {"script": {"ids": [2**31]}},
        {"script": {"logprobs": []}},
    ],
)
def test_wrong_script_is_refused(params):
    live = LiveRequests(has_scripts=True)
    with pytest.raises(InvalidRequest, match="custom_params"):
        live.add(request(custom_params=params))
    assert len(live) == 0


def test_scheduler_and_worker_learn_what_a_request_wants_of_drafts():
    live = LiveRequests(has_scripts=False, draft_len=4)
    spec = live.add(request(draft_len=2, custom_params={"simulate_accept_len": 3.25}))
    assert spec["draft_len"] == 2
    [admitted] = live.admit([1])
    assert (admitted.draft_len, admitted.simulated_len) == (2, 3.25)
    assert "draft_len" not in live.add(request(2))
    [admitted] = live.admit([2])
    assert (admitted.draft_len, admitted.simulated_len) == (None, None)


@pytest.mark.parametrize(
    ("params", "draft_len"),
    [
        ({"simulate_accept_len": 5.5}, 4),
        ({"simulate_accept_len": 0.5}, 4),
        ({"simulate_accept_len": 1}, 0),
        ({"script": {"ids": [1]}}, 4),
    ],
)
def test_what_this_server_cannot_do_is_refused(params, draft_len):
    live = LiveRequests(has_scripts=False, draft_len=draft_len)
    with pytest.raises(InvalidRequest, match="custom_params"):
        live.add(request(custom_params=params))
    assert len(live) == 0


def test_wire_request_with_every_field_becomes_a_spec():
    spec = LiveRequests(has_scripts=False).add(
        request(
            min_new_tokens=2,
            ignore_eos=True,
            priority=-3,
            cache_salt="s",
            arrival_s=1.5,
            deadline_s=2.5,
            tenant="acme",
            needs_mask=True,
        )
    )
    assert spec == {
        "request_id": 1,
        "token_ids": wire.pack_u32([5, 6]),
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": b"",
        "priority": -3,
        "tenant": spec["tenant"],
        "deadline_us": 2_500_000,
        "needs_mask": True,
        "extra_key": None,
        "cache_salt": "s",
        "arrival_us": 1_500_000,
        "whole_extend": False,
    }
    assert set(spec) <= {*msgspec.structs.asdict(request()), "arrival_us", "deadline_us"}


def test_a_tenant_has_the_same_number_in_every_request_and_another_one_has_not():
    live = LiveRequests(has_scripts=False)
    tenants = ["acme", "acme", "other", "", None]
    numbers = [live.add(request(i, tenant=t))["tenant"] for i, t in enumerate(tenants)]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 4
    assert numbers[-1] == 0
