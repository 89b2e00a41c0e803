"""Scheduler and worker of the real model in one process, with drafts or without, for tests of whole generations."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from dsserve import _native
from dsserve.config.model import load_model_config
from dsserve.models.deepseek_v4.draft import Proposal
from dsserve.protocol.engine import FinishCode, SamplingParams, pack_u32, unpack_u32, unpack_u64
from dsserve.worker.base import NUM_BUFFER_SETS, AdmittedRequest, allocate_plan_buffers
from dsserve.worker.runner import Runner, RunnerSizes, load_model
from dsserve.worker.sampler import Sampler
from dsserve.worker.speculator import SpeculationSettings, Speculator
from dsserve.worker.worker import ModelWorker, SpeculativeWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dsserve.models.deepseek_v4.model import DeepseekV41Model
    from dsserve.worker.base import StepResult
    from dsserve.worker.sampler import SamplingRow

torch.set_num_threads(1)
GOLDEN_A = Path(__file__).parent / "golden" / "data" / "v41-tiny-a"
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Ask:
    """One request of a test."""

    prompt: Sequence[int]
    max_new_tokens: int = 16
    sampling: SamplingParams = GREEDY
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    draft_len: int | None = None
    simulated_len: float | None = None
    #: After how many steps it arrives.
    arrives: int = 0
    #: Stands for a stop string: the text bridge asks to keep so many tokens once they are out.
    kept: int | None = None


@dataclass
class Answer:
    """What came of it."""

    ids: list[int] = field(default_factory=list)
    code: FinishCode = FinishCode.NONE
    cached_len: int = 0


@cache
def checkpoint_model(path: Path, *, draft: bool) -> DeepseekV41Model:
    """A checkpoint with its own draft head, or without one."""
    config = load_model_config(path)
    return load_model(
        path,
        config,
        numerics="released",
        context_length=2048 + 16,
        device=CPU,
        draft=draft,
    )


@cache
def small_model(numerics: str = "released", *, draft: bool) -> DeepseekV41Model:
    """Random weights in four layers of every kind, one draft stage; window 16."""
    whole = load_model_config(GOLDEN_A)
    config = whole.replace(
        num_hidden_layers=4,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2),
        candidate_source_layer_id=2,
        engram_layer_ids=(whole.engram_layer_ids[0],),
        engram_num_embeddings=whole.engram_num_embeddings[:1],
        dspark_target_layer_ids=(1, 2, 3),
        num_nextn_predict_layers=1,
    )
    return load_model(
        GOLDEN_A,
        config,
        numerics=numerics,
        context_length=512,
        device=CPU,
        load_format="dummy",
        draft=draft,
    )


class Server:
    """One engine without its process: requests in, answers out."""

    def __init__(
        self,
        model: Callable[..., DeepseekV41Model],
        *,
        settings: SpeculationSettings | None,
        page_size: int = 128,
        num_pages: int = 64,
        max_running_requests: int = 16,
        context_length: int = 1024,
        **scheduler: Any,
    ) -> None:
        """With `settings` it drafts; `model` is one of the functions above; others are the scheduler's."""
        loaded = model(draft=settings is not None)
        config = loaded.config
        self.eos = config.eos_token_ids[0]
        self.scheduler = _native.Scheduler(
            json.dumps(
                {
                    "page_size": page_size,
                    "num_pages": num_pages,
                    "max_running_requests": max_running_requests,
                    "context_length": context_length,
                    "chunked_prefill_size": 1024,
                    "max_prefill_tokens": 16384,
                    "window": config.sliding_window,
                    "vocab_size": config.vocab_size,
                    "encoder_replay": True,
                    "decoder_replay": True,
                    "radix_cache": True,
                    "max_steps_in_flight": 2,
                    "stateful_ratio": config.stateful_ratio,
                    "eos_token_ids": list(config.eos_token_ids),
                    "draft_len": settings.gamma if settings else 0,
                    **scheduler,
                }
            )
        )
        capacity = self.scheduler.plan_capacity()
        sizes = RunnerSizes(
            page_size, num_pages, capacity["slots"], capacity["columns"], context_length
        )
        self.runner = Runner(loaded, sizes, CPU)
        self.sampler = sampler = Sampler(
            loaded.ops,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            random_seed=1,
        )
        buffers = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
        if settings is None:
            self.worker = ModelWorker(self.runner, sampler, buffers)
        else:
            assert loaded.draft is not None
            self.speculator = Speculator(self.runner, sampler, loaded.draft, settings, CPU)
            self.worker = SpeculativeWorker(self.runner, sampler, buffers, self.speculator)
        self.scheduler.register_buffers(buffers)
        self.results: list[StepResult] = []
        #: Called after each step is applied, with the answers so far by request id.
        self.on_step: Callable[[dict[int, Answer]], None] = lambda _answers: None
        self._next_id = 1

    def close(self) -> None:
        self.worker.close()

    def run(self, asks: Sequence[Ask], *, is_overlapped: bool = True) -> list[Answer]:
        """Run requests to their ends, side by side; answers in order."""
        first_id, self._next_id = self._next_id, self._next_id + len(asks)
        answers = {first_id + i: Answer() for i in range(len(asks))}
        by_id = {first_id + i: ask for i, ask in enumerate(asks)}
        waiting = deque(sorted(by_id, key=lambda request_id: by_id[request_id].arrives))
        in_flight: deque[tuple[int, Any]] = deque()
        num_steps = 0
        told: set[int] = set()
        while True:
            while waiting and by_id[waiting[0]].arrives <= num_steps:
                self._submit(waiting[0], by_id[waiting[0]])
                waiting.popleft()
            self._take(self.scheduler.take_outputs(), answers)
            summary = self.scheduler.next_plan(num_steps % NUM_BUFFER_SETS, num_steps + 1)
            if summary is not None:
                self.worker.admit([self._admitted(i, by_id[i]) for i in summary.admitted])
                in_flight.append((summary.step_id, self.worker.launch(num_steps % NUM_BUFFER_SETS)))
                num_steps += 1
            elif not in_flight:
                if not waiting:
                    break
                num_steps = max(num_steps, by_id[waiting[0]].arrives)
                continue
            if summary is None or len(in_flight) == 2 or not is_overlapped:
                step_id, handle = in_flight.popleft()
                result = handle.wait()
                self.results.append(result)
                outputs = self.scheduler.apply(
                    step_id, result.token_ids, result.status, num_steps, result.num_ids
                )
                self._take(outputs, answers)
                self.on_step(answers)
                self._stop_early(answers, by_id, told)
        self.scheduler.check_invariants()
        assert not self.scheduler.has_work()
        return [answers[request_id] for request_id in sorted(answers)]

    def sampling_rows(self, sampling: SamplingParams, seeds: Iterable[int]) -> list[SamplingRow]:
        """States of requests that differ in their seed, apart from all others."""
        asks = {
            2**40 + seed: Ask([0], sampling=msgspec.structs.replace(sampling, seed=seed))
            for seed in seeds
        }
        self.sampler.admit([self._admitted(*each) for each in asks.items()])
        rows = self.sampler.rows_of(np.array(list(asks), dtype=np.uint64))
        self.sampler.release(asks)
        return rows

    def accept_lens(self) -> list[int]:
        """Accepted drafts and the token behind them, of every request in every VERIFY step."""
        return [
            int(count) + 1
            for result in self.results
            if result.drafts is not None
            for count, verified in zip(result.drafts.accepted, result.drafts.verified, strict=True)
            if verified
        ]

    def _submit(self, request_id: int, ask: Ask) -> None:
        spec = {
            "request_id": request_id,
            "token_ids": pack_u32(ask.prompt),
            "max_new_tokens": ask.max_new_tokens,
            "min_new_tokens": ask.min_new_tokens,
            "ignore_eos": ask.ignore_eos,
            "stop_token_ids": pack_u32(ask.stop_token_ids),
            "arrival_us": request_id,
        }
        if ask.draft_len is not None:
            spec["draft_len"] = ask.draft_len
        assert self.scheduler.submit([spec]) == []

    @staticmethod
    def _admitted(request_id: int, ask: Ask) -> AdmittedRequest:
        return AdmittedRequest(
            request_id,
            ask.sampling,
            np.array(ask.prompt, dtype=np.uint32),
            ask.stop_token_ids,
            ask.min_new_tokens,
            ask.ignore_eos,
            draft_len=ask.draft_len,
            simulated_len=ask.simulated_len,
        )

    def _stop_early(self, answers: dict[int, Answer], asks: dict[int, Ask], told: set[int]) -> None:
        for request_id, answer in answers.items():
            kept = asks[request_id].kept
            if kept is None or request_id in told or len(answer.ids) < kept:
                continue
            told.add(request_id)
            if answer.code is FinishCode.NONE:
                self.scheduler.finish(request_id, kept)
            else:
                # It ended in the same step, behind the stop: the bridge cuts the text all the same.
                del answer.ids[kept:]
                answer.code = FinishCode.STOP_STRING

    @staticmethod
    def _take(outputs: Any, answers: dict[int, Answer]) -> None:
        offsets, ids = unpack_u32(outputs.token_offsets), unpack_u32(outputs.token_ids)
        for index, request_id in enumerate(unpack_u64(outputs.request_ids)):
            answer = answers[request_id]
            answer.ids += ids[offsets[index] : offsets[index + 1]]
            answer.code = FinishCode(outputs.finish_codes[index])
            answer.cached_len = unpack_u32(outputs.cached_lens)[index]
            if answer.code is FinishCode.STOP_STRING:
                del answer.ids[unpack_u32(outputs.output_lens)[index] :]


def compare(
    model: Callable[..., DeepseekV41Model],
    batches: Sequence[Sequence[Ask]],
    settings: SpeculationSettings,
    *,
    has_oracle: bool = False,
    is_overlapped: bool = True,
    **sizes: Any,
) -> Server:
    """Run batches of requests, one after the other, without drafts and with them: the answers must be equal.

    Args:
        model: One of the functions above.
        batches: Requests that run side by side; later batches find the prefixes of earlier ones.
        settings: Of the server with drafts, which is returned, closed.
        has_oracle: Drafts come from an `OracleDraft`.
        is_overlapped: Of the server with drafts.
        sizes: Of both servers.
    """
    plain = Server(model, settings=None, **sizes)
    try:
        expected = [plain.run([replace(ask, draft_len=None) for ask in asks]) for asks in batches]
    finally:
        plain.close()
    drafted = Server(model, settings=settings, **sizes)
    try:
        if has_oracle:
            runs = [
                (ask.prompt, answer.ids)
                for asks, answers in zip(batches, expected, strict=True)
                for ask, answer in zip(asks, answers, strict=True)
            ]
            drafted.speculator.use_draft(OracleDraft(drafted.runner.model.config, runs))
        answers = [drafted.run(asks, is_overlapped=is_overlapped) for asks in batches]
    finally:
        drafted.close()
    assert answers == expected
    return drafted


class OracleDraft:
    """A draft head that often knows what the target will say: from runs without drafts, spoilt at random.

    Models of random weights draft next to nothing that is accepted; with this one every length occurs.
    """

    def __init__(self, config: Any, runs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """`runs` are prompts and outputs."""
        self._config = config
        self._rng = np.random.default_rng(0)
        self._next: dict[tuple[int, int], list[int]] = {}
        for prompt, output in runs:
            ids = [*prompt, *output]
            for position in range(len(prompt), len(ids)):
                self._next[position, ids[position]] = ids[position + 1 :]

    def propose(
        self,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        context_index: torch.Tensor,
        *,
        gamma: int,
        pools: Any,
        choose: Any,
    ) -> Proposal:
        """See `DraftModel.propose`; what the heads say of confidence is chance."""
        size = self._config.vocab_size
        ids = self._rng.integers(0, size, (len(anchors), gamma))
        places = zip(positions.tolist(), anchors.tolist(), strict=True)
        for request, place in enumerate(places):
            known = self._next.get(place, [])[:gamma]
            right = int(self._rng.integers(0, gamma + 2))
            ids[request, : len(known[:right])] = known[:right]
        logits = torch.nn.functional.one_hot(torch.from_numpy(ids), size).float() * 9
        confidence = torch.from_numpy(self._rng.normal(0.5, 2.0, ids.shape)).float()
        return Proposal(torch.from_numpy(ids), logits, confidence)
