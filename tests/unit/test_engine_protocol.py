import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsserve.protocol import engine as wire

REQUEST = wire.EngineRequest(
    request_id=2**64 - 1,
    token_ids=wire.pack_u32([1, 2**32 - 1]),
    max_new_tokens=5,
    sampling=wire.SamplingParams(temperature=0.0, seed=7, logit_bias={3: -1.5}),
    stop_token_ids=wire.pack_u32([9]),
    extra_key="",
    custom_params={"script": {"ids": [1]}},
)
TO_ENGINE = [
    wire.Hello(process_id=5),
    wire.SubmitBatch(requests=[REQUEST]),
    wire.Abort(request_ids=wire.pack_u64([1, 2**64 - 1])),
    wire.Abort(all=True),
    wire.Finish(request_id=1, kept_tokens=2),
    wire.FlushCache(query_id=1),
    wire.StateQuery(query_id=2),
    wire.Shutdown(grace_s=1.5),
]
FROM_ENGINE = [
    wire.Hello(),
    wire.LoadProgress(stage="read", done=1, total=2),
    wire.Ready(info={"page_size": 16}),
    wire.Accepted(request_ids=wire.pack_u64([1])),
    wire.Rejected(request_id=1, code="queue_full", message="full"),
    wire.Outputs(
        step_id=1,
        request_ids=wire.pack_u64([1]),
        token_offsets=wire.pack_u32([0, 1]),
        token_ids=wire.pack_u32([5]),
        finish_codes=b"\x01",
        prompt_lens=wire.pack_u32([1]),
        cached_lens=wire.pack_u32([0]),
        output_lens=wire.pack_u32([1]),
    ),
    wire.Heartbeat(time_s=1.0, step_age_s=0.0, stats={"a": 1}),
    wire.Reply(query_id=1, ok=True, payload={}),
    wire.Fatal(message="gone"),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_message_to_the_engine_survives_the_wire(message):
    assert wire.decode_to_engine(wire.encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_message_from_the_engine_survives_the_wire(message):
    assert wire.decode_from_engine(wire.encode(message)) == message


def test_arrays_are_little_endian():
    assert wire.pack_u32([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
    assert wire.pack_u64([0x0102]) == bytes([2, 1, 0, 0, 0, 0, 0, 0])


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(0, 2**64 - 1)))
def test_unpack_is_the_inverse_of_pack(tokens, request_ids):
    assert wire.unpack_u32(wire.pack_u32(tokens)) == tokens
    assert wire.unpack_u64(wire.pack_u64(request_ids)) == request_ids


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", msgspec.msgpack.encode({"type": "nothing"}), msgspec.msgpack.encode([1, 2])],
)
def test_what_is_no_message_is_a_decode_error(frame):
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(frame)
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_engine(frame)


def test_wrong_field_type_is_a_decode_error():
    frame = msgspec.msgpack.encode({"type": "finish", "request_id": "1", "kept_tokens": 0})
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(frame)


def test_finish_codes_are_those_of_the_scheduler():
    assert [code.name.lower() for code in wire.FinishCode] == [
        "none",
        "stop_token",
        "stop_string",
        "length",
        "abort",
        "error_nan",
        "error_pool",
        "error_internal",
        "deadline",
        "dropped",
    ]
    assert list(wire.FinishCode) == list(range(10))
