"""What does the engine do on each message of the API process?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dsserve.engine.parts import PromptParts
from dsserve.errors import InvalidRequest
from dsserve.protocol import engine as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsserve.engine.inbox import LiveRequests
    from dsserve.engine.outbox import Outbox
    from dsserve.engine.scheduler_api import SchedulerApi

logger = logging.getLogger(__name__)


class Control:
    """Applies messages to the scheduler, and answers them.

    Attributes:
        drain_until_s: When requests still running are aborted; None unless shutting down.
    """

    def __init__(
        self,
        *,
        scheduler: SchedulerApi,
        requests: LiveRequests,
        outbox: Outbox,
        clock: Callable[[], float],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        """Prepare.

        Args:
            scheduler: Takes what the messages ask for.
            requests: Where requests are kept until they end.
            outbox: Where answers go.
            clock: Seconds.
            describe: Gives the payload of the answer to a state query.
        """
        self._scheduler = scheduler
        self._requests = requests
        self._outbox = outbox
        self._clock = clock
        self._describe = describe
        self._parts = PromptParts()
        self.drain_until_s: float | None = None

    @property
    def is_draining(self) -> bool:
        """Whether the engine was told to shut down."""
        return self.drain_until_s is not None

    @property
    def has_parts(self) -> bool:
        """Whether the scheduler lacks parts of a prompt."""
        return len(self._parts) > 0

    def feed(self) -> None:
        """Hand the next part of a long prompt to the scheduler; the last one is the submission."""
        whole, refused = self._parts.feed(self._scheduler)
        if whole is not None and whole in self._requests.ids():
            self._outbox.send(wire.Accepted(request_ids=wire.pack_u64([whole])))
        if refused is not None:
            self._requests.remove([refused[0]])
            self._reject(*refused)

    def handle(self, messages: Sequence[wire.ToEngine]) -> None:
        """Apply messages in order; neighbouring submissions become one call of the scheduler."""
        batch: list[wire.EngineRequest] = []
        for message in messages:
            if isinstance(message, wire.SubmitBatch):
                batch.extend(message.requests)
                continue
            self._submit(batch)
            batch = []
            self._handle_one(message)
        self._submit(batch)

    def abort_overdue(self, now_s: float) -> None:
        """Abort what runs past the end of the grace period."""
        if self.drain_until_s is not None and now_s >= self.drain_until_s and len(self._requests):
            logger.warning("aborting %d requests after the grace period", len(self._requests))
            self._scheduler.abort(self._requests.ids())
            self.drain_until_s = float("inf")

    def _submit(self, batch: list[wire.EngineRequest]) -> None:
        if not batch:
            return
        specs: list[dict[str, Any]] = []
        for request in batch:
            if self.is_draining:
                self._reject(request.request_id, "not_ready", "the server is shutting down")
                continue
            try:
                specs.append(self._requests.add(request))
            except InvalidRequest as error:
                self._reject(request.request_id, error.code, error.message)
        in_parts = {spec["request_id"] for spec in specs if self._parts.begin(spec)}
        rejected = self._scheduler.submit(specs) if specs else []
        refused = {request_id for request_id, _, _ in rejected}
        self._requests.remove(refused)
        self._parts.drop(refused)
        answered = refused | in_parts
        accepted = [s["request_id"] for s in specs if s["request_id"] not in answered]
        if accepted:
            self._outbox.send(wire.Accepted(request_ids=wire.pack_u64(accepted)))
        for request_id, code, message in rejected:
            self._reject(request_id, code, message)

    def _reject(self, request_id: int, code: str, message: str) -> None:
        logger.debug("request %d rejected: %s: %s", request_id, code, message)
        self._outbox.send(wire.Rejected(request_id=request_id, code=code, message=message))

    def _handle_one(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Abort(all=True):
                self._scheduler.abort(self._requests.ids())
            case wire.Abort():
                self._scheduler.abort(wire.unpack_u64(message.request_ids))
            case wire.Finish():
                self._scheduler.finish(message.request_id, message.kept_tokens)
            case wire.FlushCache():
                is_done, holders = self._scheduler.flush()
                logger.info("flush of the prefix cache: %s", "done" if is_done else "refused")
                self._reply(message.query_id, {"holders": holders}, ok=is_done)
            case wire.StateQuery():
                self._scheduler.check_invariants()
                self._reply(message.query_id, self._describe(), ok=True)
            case wire.Shutdown():
                logger.info("shutting down, grace period %g s", message.grace_s)
                self.drain_until_s = self._clock() + message.grace_s
            case wire.Hello() | wire.SubmitBatch():
                pass  # the inbox keeps hellos, `handle` the submissions

    def _reply(self, query_id: int, payload: dict[str, Any], *, ok: bool) -> None:
        self._outbox.send(wire.Reply(query_id=query_id, ok=ok, payload=payload))
