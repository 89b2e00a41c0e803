"""How do results become messages to the API process?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

from dsserve.protocol import engine as wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsserve.engine.scheduler_api import StepOutputs
    from dsserve.protocol.engine import FromEngine

HIGH_WATER_MARK = 10_000
"""Messages kept for an API process that does not read. When full the step loop waits: nothing is
dropped, and the watchdog ends an engine that waits too long."""

_POLL_MS = 100


class Outbox:
    """The engine's end of the socket that the API process pulls from. One thread uses it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, message: FromEngine) -> None:
        """Send a message, waiting while the socket's queue is full."""
        frame = wire.encode(message)
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._socket.poll(_POLL_MS, zmq.POLLOUT)
            else:
                return

    def try_send(self, message: FromEngine) -> bool:
        """Send a message unless the socket's queue is full; for what may be lost."""
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def send_outputs(
        self, step_id: int, outputs: StepOutputs, drafts: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Send the outputs of a step.

        Args:
            step_id: 0 where they belong to none.
            outputs: What the scheduler gave.
            drafts: Accepted and rejected draft tokens of each request in it, so far.
        """
        self.send(
            wire.Outputs(
                step_id=step_id,
                request_ids=outputs.request_ids,
                token_offsets=outputs.token_offsets,
                token_ids=outputs.token_ids,
                finish_codes=outputs.finish_codes,
                prompt_lens=outputs.prompt_lens,
                cached_lens=outputs.cached_lens,
                output_lens=outputs.output_lens,
                accepted_drafts=wire.pack_u32(accepted for accepted, _ in drafts),
                rejected_drafts=wire.pack_u32(rejected for _, rejected in drafts),
            )
        )
