"""What became of draft tokens: totals for the metrics, and counts of each request for its usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsserve.protocol.engine import unpack_u32, unpack_u64

if TYPE_CHECKING:
    from dsserve.engine.scheduler_api import StepOutputs
    from dsserve.worker.base import StepDrafts


class DraftCounts:
    """Accepted and rejected draft tokens, so far. The step loop's thread writes."""

    def __init__(self, draft_len: int) -> None:
        """Nothing drafted yet; blocks have up to `draft_len` drafts."""
        self._by_request: dict[int, tuple[int, int]] = {}
        self._accept_lens = [0] * (draft_len + 1)
        self._verify_lens = [0] * (draft_len + 1)
        self._told = (0, 0)

    def note(self, drafts: StepDrafts, outputs: StepOutputs) -> None:
        """Count a step's drafts; of requests that had ended before, nothing is counted."""
        offsets = unpack_u32(outputs.token_offsets)
        num_new = {
            request_id: offsets[index + 1] - offsets[index]
            for index, request_id in enumerate(unpack_u64(outputs.request_ids))
        }
        rows = zip(
            drafts.request_ids.tolist(),
            drafts.verified.tolist(),
            drafts.accepted.tolist(),
            strict=True,
        )
        for request_id, verified, accepted in rows:
            if verified == 0 or not num_new.get(request_id):
                continue
            self._verify_lens[verified] += 1
            self._accept_lens[accepted] += 1
            # An output that ends inside the run holds fewer drafts than were accepted.
            kept = min(accepted, num_new[request_id])
            before = self._by_request.get(request_id, (0, 0))
            self._by_request[request_id] = before[0] + kept, before[1] + verified - kept

    def of_request(self, request_id: int) -> tuple[int, int]:
        """Draft tokens of a request that are in its output, and others that were verified."""
        return self._by_request.get(request_id, (0, 0))

    def forget(self, request_id: int) -> None:
        """Forget an ended request."""
        self._by_request.pop(request_id, None)

    def take_accept_len(self) -> float:
        """Mean accept length since the last call, the token behind the drafts included; 0 without a verification."""
        calls = sum(self._accept_lens)
        accepted = sum(length * count for length, count in enumerate(self._accept_lens))
        told_calls, told_accepted = self._told
        self._told = calls, accepted
        if calls == told_calls:
            return 0.0
        return round(1 + (accepted - told_accepted) / (calls - told_calls), 3)

    def totals(self) -> dict[str, Any]:
        """Verifications by their number of drafts and of accepted drafts, for the metrics."""
        return {
            "speculation": {
                "verify_lens": list(self._verify_lens),
                "accept_lens": list(self._accept_lens),
            }
        }
