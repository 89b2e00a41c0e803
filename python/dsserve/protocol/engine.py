"""What do the API process and the engine process say to each other, and in which bytes?

Messages are msgspec structs in msgpack, one per ZMQ frame. Arrays travel inside them as raw
little-endian bytes: token ids as u32, request ids as u64, finish codes as u8. Each side says
`Hello` first; a different `PROTOCOL_VERSION` is refused. No pickle anywhere.
"""

import enum
import sys
from array import array
from collections.abc import Iterable
from typing import Any, Final

import msgspec

PROTOCOL_VERSION: Final = 3
"""Raised whenever a struct of this module changes."""

TO_ENGINE_SOCKET: Final = "to_engine.sock"
"""Name in the ipc directory of the socket that the engine process binds and pulls from."""

FROM_ENGINE_SOCKET: Final = "from_engine.sock"
"""Name in the ipc directory of the socket that the API process binds and pulls from."""

MAX_REQUEST_ID: Final = 2**64 - 1
MAX_TOKEN_ID: Final = 2**32 - 1


class FinishCode(enum.IntEnum):
    """Why a request ended; the numbers are shared with the Rust scheduler."""

    NONE = 0
    STOP_TOKEN = 1
    STOP_STRING = 2
    LENGTH = 3
    ABORT = 4
    ERROR_NAN = 5
    ERROR_POOL = 6
    ERROR_INTERNAL = 7
    DEADLINE = 8
    DROPPED = 9


class ExitCode(enum.IntEnum):
    """Exit status of the engine process."""

    OK = 0
    FAULT = 1
    CONFIG = 2
    WATCHDOG = 4
    PROTOCOL = 5
    ORPHANED = 6


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token of a request is drawn; the defaults change nothing.

    Attributes:
        temperature: 0 means greedy.
        top_k: -1 means the whole vocabulary.
        seed: Drawn by the engine if None.
        logit_bias: Token id to what is added to its logit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the fake model does for one request instead of hashing (`serving.md` 0.4).

    Attributes:
        ids: Output ids to emit first; hashed ones follow.
        delays_us: Added to the time of the step that samples output token i.
        nan_at: The index of the output token whose logits are not numbers.
        fault_at: The index of the output token at which the device fails, which ends the engine.
    """

    ids: list[int] = []
    delays_us: list[int] = []
    nan_at: int | None = None
    fault_at: int | None = None


class CustomParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a request's `custom_params`.

    Attributes:
        script: Of the fake model only.
        simulate_accept_len: For benchmarks of a server with drafts: that many tokens a step on
            average (accepted drafts and the one behind them), whatever the target says of them.
    """

    script: Script | None = None
    simulate_accept_len: float | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One generation.

    Attributes:
        request_id: u64, unique among live requests; the client hands it out.
        token_ids: Prompt, u32 little-endian.
        stop_token_ids: u32 little-endian, besides the model's end-of-sequence ids.
        arrival_s: `time.monotonic()` of this machine when the request came in.
        priority: Urgency where priorities are enabled; None is the least urgent.
        tenant: Whom it is for, where the machine is shared fairly.
        deadline_s: `time.monotonic()` of this machine after which it is of no use.
        needs_mask: Its sampling waits for the mask of a grammar.
        whole_extend: Run the decoder half on every uncached row (no decoder replay tail).
        max_cached_len: Take no more tokens than that from the prefix cache; None = as many as it holds.
        draft_len: Draft tokens of a step at most, 0 = none; None = what the server gives.
        custom_params: The keys of `CustomParams`, checked by the engine.
    """

    request_id: int
    token_ids: bytes
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: bytes = b""
    priority: int | None = None
    tenant: str | None = None
    deadline_s: float | None = None
    needs_mask: bool = False
    extra_key: str | None = None
    cache_salt: str | None = None
    arrival_s: float = 0.0
    whole_extend: bool = False
    max_cached_len: int | None = None
    draft_len: int | None = None
    custom_params: dict[str, Any] | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The file that `python -m dsserve.engine` reads.

    Attributes:
        server: The resolved `ServerConfig` as a dict of plain values, without any key.
        ipc_dir: Directory of mode 0700 with both sockets.
        parent_pid: The process that must stay alive; 0 for none.
    """

    server: dict[str, Any]
    model_path: str
    ipc_dir: str
    protocol_version: int = PROTOCOL_VERSION
    parent_pid: int = 0
    log_level: str = "info"
    log_json: bool = False


# API process -> engine process


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message in both directions."""

    protocol_version: int = PROTOCOL_VERSION
    process_id: int = 0


class SubmitBatch(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """New requests. Each is answered by `Accepted` or `Rejected`, then by `Outputs`."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End requests early; unknown and finished ids are ignored.

    Attributes:
        request_ids: u64 little-endian.
        all: Every request the engine holds; `request_ids` is then ignored.
    """

    request_ids: bytes = b""
    all: bool = False


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """A stop string was found: keep the first `kept_tokens` output ids and end the request."""

    request_id: int
    kept_tokens: int


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush"):
    """Empty the prefix cache if nothing runs; answered by `Reply`."""

    query_id: int


class StateQuery(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Ask for the scheduler's state after an invariant check; answered by `Reply`."""

    query_id: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Finish what runs for at most `grace_s`, abort the rest, exit with 0."""

    grace_s: float = 0.0


ToEngine = Hello | SubmitBatch | Abort | Finish | FlushCache | StateQuery | Shutdown

# engine process -> API process


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Start-up progress; `total` 0 means unknown. Units depend on the stage (bytes for weights)."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine takes requests. `info` holds what `/get_server_info` shows."""

    info: dict[str, Any]


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """The scheduler has taken these requests (u64 little-endian); each ends in one `Outputs`."""

    request_ids: bytes


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """The scheduler refused a request; nothing else follows for it."""

    request_id: int
    code: str
    message: str


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """New tokens of one step, for all requests that have any or that end.

    With n requests: `request_ids` u64[n], `token_offsets` u32[n + 1] into `token_ids` u32[],
    `finish_codes` u8[n], `prompt_lens`, `cached_lens` and `output_lens` u32[n] (totals so far).
    `accepted_drafts` and `rejected_drafts` u32[n]: draft tokens that are in the output, and others
    that were verified (totals so far); empty on a server without drafts.
    A finish code other than 0 is the last word on that request.
    """

    step_id: int
    request_ids: bytes
    token_offsets: bytes
    token_ids: bytes
    finish_codes: bytes
    prompt_lens: bytes
    cached_lens: bytes
    output_lens: bytes
    accepted_drafts: bytes = b""
    rejected_drafts: bytes = b""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent by the step loop itself, so a stuck loop stops beating.

    Attributes:
        time_s: `time.monotonic()` when sent.
        step_age_s: How long the oldest launched step has been running; 0 if none is.
        stats: Counters and levels of the scheduler and the loop.
    """

    time_s: float
    step_age_s: float
    stats: dict[str, Any]


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """Answer to `FlushCache` or `StateQuery`."""

    query_id: int
    ok: bool
    payload: dict[str, Any]


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag="fatal"):
    """The engine process is about to exit with a code other than 0."""

    message: str


FromEngine = (
    Hello | LoadProgress | Ready | Accepted | Rejected | Outputs | Heartbeat | Reply | Fatal
)

_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Turn a message into the bytes of one frame."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Read a frame that the engine process received.

    Raises:
        msgspec.DecodeError: If it is not a valid message (`ValidationError` is a subclass).
    """
    return _to_engine_decoder.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    """Read a frame that the API process received.

    Raises:
        msgspec.DecodeError: If it is not a valid message.
    """
    return _from_engine_decoder.decode(frame)


def pack_u32(values: Iterable[int]) -> bytes:
    """Turn token ids or lengths into u32 little-endian bytes."""
    return _pack("I", values)


def unpack_u32(data: bytes) -> list[int]:
    """Turn u32 little-endian bytes into integers."""
    return _unpack("I", data)


def pack_u64(values: Iterable[int]) -> bytes:
    """Turn request ids into u64 little-endian bytes."""
    return _pack("Q", values)


def unpack_u64(data: bytes) -> list[int]:
    """Turn u64 little-endian bytes into integers."""
    return _unpack("Q", data)


def _pack(code: str, values: Iterable[int]) -> bytes:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes) -> list[int]:
    unpacked = array(code)
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()
