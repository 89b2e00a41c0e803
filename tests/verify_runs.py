"""Verify steps whose blocks are cut, drafts of known quality for them, and what each step leaves on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dsserve.kv.layout import TAIL_RING
from dsserve.models.deepseek_v4.draft import Proposal
from dsserve.protocol.engine import SamplingParams
from dsserve.worker.base import PHASE_VERIFY
from dsserve.worker.batch import PlanView
from dsserve.worker.relay import ring_rows
from worker_drive import MODEL_CONFIG, Ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dsserve.worker.cuda_speculation import CudaSpeculativeWorker

GAMMA, VOCAB_SIZE = MODEL_CONFIG.dspark_block_size, MODEL_CONFIG.vocab_size


class KnownDrafts:
    """Drafts of known outputs; how many of a block are right depends on its place, from none to more than all.

    It looks everything up where its inputs are, so that it can be captured.
    """

    def __init__(self, asks: Sequence[Ask], outputs: Sequence[list[int]], device: Any) -> None:
        """`outputs` without drafts."""
        runs = [[*ask.prompt, *ids] for ask, ids in zip(asks, outputs, strict=True)]
        following = np.zeros((max(map(len, runs)), VOCAB_SIZE, GAMMA), dtype=np.int64)
        for ask, ids in zip(asks, runs, strict=True):
            for position in range(len(ask.prompt), len(ids)):
                known = ids[position + 1 : position + 1 + GAMMA]
                following[position, ids[position], : len(known)] = known
        self._following = torch.from_numpy(following).to(device)

    def propose(self, anchors: Tensor, positions: Tensor, *_: Any, **__: Any) -> Proposal:
        """See `DraftModel.propose`; all drafts have a confidence of 1/2."""
        last = self._following.shape[0] - 1
        ids = self._following[positions.clamp_max(last), anchors]
        num_right = (positions % (GAMMA + 2)).unsqueeze(1)
        is_right = torch.arange(GAMMA, device=ids.device) < num_right
        ids = torch.where(is_right, ids, (ids + 1) % VOCAB_SIZE)
        logits = torch.zeros(*ids.shape, VOCAB_SIZE, device=ids.device)
        logits.scatter_(2, ids.unsqueeze(2), 9.0)
        return Proposal(ids, logits, torch.zeros(ids.shape, device=ids.device))


@dataclass
class VerifyStep:
    """A step's drafts, the log-probabilities of its rows and everything that later steps may read."""

    draft_len: NDArray[np.int64]
    log_probs: Tensor
    state: dict[str, Tensor]


def trace(worker: CudaSpeculativeWorker, steps: list[VerifyStep]) -> CudaSpeculativeWorker:
    """The worker, which from now on adds its verify steps to `steps`; on a device whose stream runs at once."""
    speculator = worker._speculator
    launch, acceptance, kept = worker.launch, speculator.acceptance, {}
    accept = acceptance.accept

    def keeping_accept(logits: Tensor, *rest: Any) -> Any:
        kept["logits"] = logits
        return accept(logits, *rest)

    def tracing_launch(set_index: int) -> Any:
        handle = launch(set_index)
        plan = PlanView.of(worker.buffer_sets()[set_index])
        if plan.phase == PHASE_VERIFY:
            log_probs = kept["logits"][: len(plan.token_ids)].log_softmax(1)
            steps.append(VerifyStep(plan.draft_len, log_probs, _state(worker, plan)))
        return handle

    acceptance.accept = keeping_accept  # type: ignore[method-assign]
    worker.launch = tracing_launch  # type: ignore[method-assign]
    return worker


def _state(worker: CudaSpeculativeWorker, plan: PlanView) -> dict[str, Tensor]:
    """All but slot 0 and page 0; of the token ring the ids that are read, which end with the anchor."""
    relay, pools = worker._speculator.relay, worker._runner.pools
    layout, slots = pools.layout, torch.from_numpy(plan.request_slot)
    newest = relay.committed_len[slots].unsqueeze(1) + torch.arange(-2, 1)
    parts = {
        "committed_len": relay.committed_len[1:],
        "ids": pools.token_ring[ring_rows(slots.unsqueeze(1), newest)],
    }
    for layer, pool in pools.window.items():
        parts[f"window {layer}"] = pool[layout.window_ring_rows :]
    for source, pool in pools.tail.items():
        parts[f"tail {source}"] = pool[TAIL_RING:]
    for source in layout.source_ratios:
        first = layout.rows_per_page(source)
        parts[f"main {source}"] = pools.main[source][first:]
        parts[f"index {source}"] = pools.index[source][first:]
    return {name: tensor.clone() for name, tensor in parts.items()}


def assert_same_steps(left: Sequence[VerifyStep], right: Sequence[VerifyStep]) -> None:
    """Bit for bit."""
    assert len(left) == len(right)
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        assert one.draft_len.tolist() == other.draft_len.tolist()
        assert torch.equal(one.log_probs, other.log_probs), number
        for name, tensor in one.state.items():
            assert torch.equal(tensor, other.state[name]), (number, name)


def limited_asks() -> list[Ask]:
    """Outputs that end at every place of a block, greedy and sampled."""
    return [_ask(count, is_greedy=count % 2 == 0) for count in range(3, 3 + GAMMA + 1)]


def unlike_asks() -> list[Ask]:
    """Requests that want no drafts, some, as many as there are."""
    wanted = [*range(GAMMA), None]
    asks = [_ask(9 + number, is_greedy=number % 2 == 1) for number in range(len(wanted))]
    return [replace(ask, draft_len=most) for ask, most in zip(asks, wanted, strict=True)]


def ending_asks(asks: Sequence[Ask], outputs: Sequence[list[int]]) -> list[Ask]:
    """The same asks, each with an end token that its output has first at another place of a block."""
    result = []
    for number, (ask, ids) in enumerate(zip(asks, outputs, strict=True)):
        first_places = [place for place, token in enumerate(ids) if token not in ids[:place]]
        place = min(first_places, key=lambda place: abs(place - 1 - number))
        result.append(replace(ask, stop_token_ids=(ids[place],)))
    return result


def _ask(count: int, *, is_greedy: bool) -> Ask:
    rng = np.random.default_rng(count)
    sampled = SamplingParams(temperature=0.8, seed=count, top_k=60, top_p=0.95)
    prompt = [0, *rng.integers(3, 500, 2 + 2 * count).tolist()]
    return Ask(prompt, count, SamplingParams(temperature=0.0) if is_greedy else sampled)
