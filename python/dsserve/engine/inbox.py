"""How do messages of the API process become batches for the scheduler?"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from dsserve.errors import EngineFault, InvalidRequest
from dsserve.protocol import engine as wire
from dsserve.worker.base import AdmittedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

MAX_MESSAGES = 256
MAX_DRAIN_S = 200e-6
"""Bounds of one pass (`serving.md` a.2): what is left waits for the next."""

_U32, _I32, _U64 = 2**32, 2**31, 2**64

_NO_CUSTOM_PARAMS = wire.CustomParams()


class ProtocolMismatch(EngineFault):
    """The API process speaks another version of the protocol."""

    default_code = "protocol_mismatch"


class Inbox:
    """The engine's end of the socket that the API process pushes to.

    Frames that are no valid message are logged and dropped; so is everything before a `Hello`.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket = socket
        self._clock = clock
        self._is_greeted = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message; say whether one is there."""
        return bool(self._socket.poll(int(timeout_s * 1000), zmq.POLLIN))

    def drain(self) -> list[wire.ToEngine]:
        """Take the messages that are there, within the bounds of one pass.

        Raises:
            ProtocolMismatch: A `Hello` names another version.
        """
        messages: list[wire.ToEngine] = []
        until_s = self._clock() + MAX_DRAIN_S
        for _ in range(MAX_MESSAGES):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self._decode(frame)
            if message is not None:
                messages.append(message)
            if self._clock() > until_s:
                break
        return messages

    def _decode(self, frame: bytes) -> wire.ToEngine | None:
        try:
            message = wire.decode_to_engine(frame)
        except msgspec.DecodeError as error:
            logger.error("dropped a malformed message of %d bytes: %s", len(frame), error)  # noqa: TRY400 - the sender is at fault, a traceback says nothing
            return None
        if isinstance(message, wire.Hello):
            if message.protocol_version != wire.PROTOCOL_VERSION:
                raise ProtocolMismatch(
                    f"the API process speaks protocol version {message.protocol_version}, the "
                    f"engine process {wire.PROTOCOL_VERSION}; both must come from one installation"
                )
            self._is_greeted = True
            return None
        if not self._is_greeted:
            logger.error("dropped a %s message before any hello", type(message).__name__)
            return None
        return message


class LiveRequests:
    """The requests that the scheduler holds, until their end is sent."""

    def __init__(self, *, has_scripts: bool, draft_len: int = 0) -> None:
        """Start empty.

        Args:
            has_scripts: The worker is the fake model; otherwise scripts are refused.
            draft_len: Drafts of a step; without any, nothing of them can be asked for.
        """
        self._draft_len = draft_len
        self._requests: dict[int, wire.EngineRequest] = {}
        self._custom: dict[int, wire.CustomParams] = {}
        self._at_worker: set[int] = set()
        self._has_scripts = has_scripts

    def __len__(self) -> int:
        return len(self._requests)

    def ids(self) -> list[int]:
        """Ids of all live requests."""
        return list(self._requests)

    def add(self, request: wire.EngineRequest) -> dict[str, Any]:
        """Check a request and return its spec for the scheduler.

        Raises:
            InvalidRequest: A field is out of range; the request is not added.
        """
        _check_request(request)
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request id {request.request_id} is in use", code="duplicate_request_id"
            )
        custom = self._read_custom(request)
        self._requests[request.request_id] = request
        if custom is not None:
            self._custom[request.request_id] = custom
        spec = {
            "request_id": request.request_id,
            "token_ids": request.token_ids,
            "max_new_tokens": request.max_new_tokens,
            "min_new_tokens": request.min_new_tokens,
            "ignore_eos": request.ignore_eos,
            "stop_token_ids": request.stop_token_ids,
            "priority": request.priority,
            "tenant": 0 if request.tenant is None else _tenant_number(request.tenant),
            "deadline_us": None if request.deadline_s is None else int(request.deadline_s * 1e6),
            "needs_mask": request.needs_mask,
            "extra_key": request.extra_key,
            "cache_salt": request.cache_salt,
            "arrival_us": int(request.arrival_s * 1e6),
            "whole_extend": request.whole_extend,
        }
        for name in ("draft_len", "max_cached_len"):
            if (limit := getattr(request, name)) is not None:
                spec[name] = limit
        return spec

    def admit(self, request_ids: Iterable[int]) -> list[AdmittedRequest]:
        """Return what the worker must learn of requests it does not know yet."""
        admitted = []
        for request_id in request_ids:
            if request_id in self._at_worker:
                continue  # resumed after a retraction
            self._at_worker.add(request_id)
            request = self._requests[request_id]
            custom = self._custom.get(request_id, _NO_CUSTOM_PARAMS)
            admitted.append(
                AdmittedRequest(
                    request_id=request_id,
                    sampling=request.sampling,
                    prompt_token_ids=np.frombuffer(request.token_ids, dtype="<u4"),
                    stop_token_ids=tuple(wire.unpack_u32(request.stop_token_ids)),
                    min_new_tokens=request.min_new_tokens,
                    ignore_eos=request.ignore_eos,
                    script=custom.script,
                    draft_len=request.draft_len,
                    simulated_len=custom.simulate_accept_len,
                )
            )
        return admitted

    def remove(self, request_ids: Iterable[int]) -> list[int]:
        """Forget ended requests; returns those that the worker knows."""
        known = []
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._custom.pop(request_id, None)
            if request_id in self._at_worker:
                self._at_worker.remove(request_id)
                known.append(request_id)
        return known

    def _read_custom(self, request: wire.EngineRequest) -> wire.CustomParams | None:
        if request.custom_params is None:
            return None
        try:
            custom = msgspec.convert(request.custom_params, wire.CustomParams)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"custom_params: {error}") from None
        script = custom.script
        if script is not None:
            if not self._has_scripts:
                raise InvalidRequest("custom_params.script only works with --load-format fake")
            if any(not 0 <= token < _I32 for token in script.ids):
                raise InvalidRequest("custom_params.script.ids holds an id outside 0..2^31 - 1")
        length, most = custom.simulate_accept_len, self._draft_len + 1
        if length is not None and not (self._draft_len and 1 <= length <= most):
            raise InvalidRequest(
                f"custom_params.simulate_accept_len is {length}; it must lie within 1 and {most} "
                "on a server with drafts"
            )
        return custom


def _tenant_number(tenant: str) -> int:
    """A number for a tenant's name; two names share one with a chance of 2^-64."""
    digest = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _check_request(request: wire.EngineRequest) -> None:
    """Refuse what cannot be handed to the scheduler at all; limits are the scheduler's own."""
    in_range = {
        "request_id": 0 <= request.request_id < _U64,
        "token_ids": len(request.token_ids) % 4 == 0,
        "stop_token_ids": len(request.stop_token_ids) % 4 == 0,
        "max_new_tokens": 0 <= request.max_new_tokens < _U32,
        "min_new_tokens": 0 <= request.min_new_tokens < _U32,
        "draft_len": request.draft_len is None or 0 <= request.draft_len < _U32,
        "priority": request.priority is None or -_I32 <= request.priority < _I32,
        "deadline_s": request.deadline_s is None or 0 <= request.deadline_s < 1e12,
        "arrival_s": 0 <= request.arrival_s < 1e12,
    }
    for name, is_right in in_range.items():
        if not is_right:
            raise InvalidRequest(f"{name} is out of range", param=name)
