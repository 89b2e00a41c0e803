"""Runs requests through a scheduler and a worker, two steps in flight, without an engine process."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from dsserve import _native
from dsserve.config.model import load_model_config
from dsserve.config.resolve import resolve
from dsserve.config.server import ServerConfig
from dsserve.engine.settings import scheduler_config
from dsserve.protocol.engine import SamplingParams
from dsserve.worker import runner as runner_module
from dsserve.worker.base import NUM_BUFFER_SETS, AdmittedRequest, allocate_plan_buffers
from dsserve.worker.cuda import CudaWorker
from dsserve.worker.cuda_speculation import CudaSpeculativeWorker
from dsserve.worker.runner import Runner, RunnerSizes, load_model
from dsserve.worker.sampler import Sampler
from dsserve.worker.speculator import SpeculationSettings, Speculator
from dsserve.worker.worker import ModelWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsserve.worker.base import StepHandle, Worker
    from dsserve.worker.cuda_device import Device
    from dsserve.worker.cuda_graphs import Bucket
    from dsserve.worker.speculator import Drafts

CHECKPOINT = Path(__file__).parent / "golden" / "data" / "v41-tiny-a"
NUM_PAGES, SLOTS = 60, 8
MODEL_CONFIG = load_model_config(CHECKPOINT)


@dataclass
class Ask:
    prompt: list[int]
    count: int
    sampling: SamplingParams
    min_new_tokens: int = 0
    draft_len: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class Drive:
    """A scheduler and a worker, two steps in flight."""

    def __init__(
        self, build: Any, algorithm: str = "none", max_running_requests: int = SLOTS - 1
    ) -> None:
        server = resolve(
            ServerConfig(
                model_path=str(CHECKPOINT),
                page_size=16,
                max_running_requests=max_running_requests,
                chunked_prefill_size=48,
                speculative_algorithm=algorithm,
            ),
            MODEL_CONFIG,
        )
        settings = scheduler_config(server, MODEL_CONFIG, num_pages=NUM_PAGES)
        self.scheduler = _native.Scheduler(json.dumps(settings))
        capacity = {**self.scheduler.plan_capacity(), "pages": NUM_PAGES, "page_size": 16}
        self.worker: Worker = build(capacity)
        self.scheduler.register_buffers(self.worker.buffer_sets())
        self.num_verify_steps = 0

    def run(self, asks: list[Ask]) -> list[list[int]]:
        """Output ids of each request, in order."""
        specs, requests = [], {}
        for request_id, ask in enumerate(asks):
            spec = {
                "request_id": request_id,
                "token_ids": np.array(ask.prompt, dtype="<u4").tobytes(),
                "max_new_tokens": ask.count,
                "min_new_tokens": ask.min_new_tokens,
                "ignore_eos": not ask.min_new_tokens,
                "stop_token_ids": np.array(ask.stop_token_ids, dtype="<u4").tobytes(),
                "priority": 0,
                "arrival_us": 0,
            }
            if ask.draft_len is not None:
                spec["draft_len"] = ask.draft_len
            specs.append(spec)
            requests[request_id] = AdmittedRequest(
                request_id,
                ask.sampling,
                np.array(ask.prompt, dtype=np.uint32),
                ask.stop_token_ids,
                ask.min_new_tokens,
                not ask.min_new_tokens,
                draft_len=ask.draft_len,
            )
        assert self.scheduler.submit(specs) == []
        outputs: list[list[int]] = [[] for _ in asks]
        flying: deque[tuple[int, StepHandle]] = deque()
        next_set = 0
        while True:
            summary = self.scheduler.next_plan(next_set, 0)
            if summary is not None:
                self.worker.admit([requests[i] for i in summary.admitted])
                flying.append((summary.step_id, self.worker.launch(next_set)))
                next_set = (next_set + 1) % NUM_BUFFER_SETS
            if len(flying) == 2 or (flying and summary is None):
                step_id, handle = flying.popleft()
                assert handle.wait_done(10)
                result = handle.wait()
                assert result.step_id == step_id
                assert result.finished_s >= result.started_s
                self.num_verify_steps += result.drafts is not None
                out = self.scheduler.apply(
                    step_id, result.token_ids, result.status, 0, result.num_ids
                )
                ids = np.frombuffer(out.token_ids, "<u4").tolist()
                offsets = np.frombuffer(out.token_offsets, "<u4").tolist()
                for index, request in enumerate(np.frombuffer(out.request_ids, "<u8").tolist()):
                    outputs[request] += ids[offsets[index] : offsets[index + 1]]
            elif summary is None:
                break
        self.scheduler.check_invariants()
        self.worker.release(list(requests))
        self.worker.close()
        return outputs


def sizes(capacity: dict[str, int]) -> RunnerSizes:
    return RunnerSizes(16, NUM_PAGES, capacity["slots"], capacity["columns"], 512)


def load(
    platform: str,
    numerics: str = "released",
    device: torch.device | None = None,
    *,
    draft: bool = False,
) -> Any:
    """Checkpoint A on a device, with the operators of a platform; the CPU runs those of CUDA, too."""
    with pytest.MonkeyPatch.context() as patch:
        chosen = runner_module.select_operators
        patch.setattr(runner_module, "select_operators", lambda _, level: chosen(platform, level))
        return load_model(
            CHECKPOINT,
            MODEL_CONFIG,
            numerics=numerics,
            context_length=512,
            device=device or torch.device("cpu"),
            draft=draft,
        )


def sampler_options() -> dict[str, Any]:
    return {"vocab_size": 512, "eos_token_ids": MODEL_CONFIG.eos_token_ids, "random_seed": 3}


def cpu_worker(model: Any, capacity: dict[str, int]) -> ModelWorker:
    runner = Runner(model, sizes(capacity), torch.device("cpu"))
    buffers = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
    return ModelWorker(runner, Sampler(model.ops, **sampler_options()), buffers)


def device_worker(
    model: Any, device: Device, capacity: dict[str, int], buckets: Sequence[Bucket] = ()
) -> CudaWorker:
    runner = Runner(model, sizes(capacity), device.torch_device)
    buffers = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
    sampler = Sampler(model.ops, **sampler_options(), device=device.torch_device)
    return CudaWorker(device, runner, sampler, buffers, buckets)


def draft_worker(
    model: Any,
    device: Device,
    capacity: dict[str, int],
    buckets: Sequence[Bucket] = (),
    draft: Drafts | None = None,
    **settings: Any,
) -> CudaSpeculativeWorker:
    """With `draft` instead of the model's head; `settings` are those of `SpeculationSettings`."""
    runner = Runner(model, sizes(capacity), device.torch_device)
    buffers = [allocate_plan_buffers(capacity) for _ in range(NUM_BUFFER_SETS)]
    sampler = Sampler(model.ops, **sampler_options(), device=device.torch_device)
    speculator = Speculator(
        runner,
        sampler,
        draft or model.draft,
        SpeculationSettings(gamma=MODEL_CONFIG.dspark_block_size, **settings),
        device.torch_device,
        inputs_on=torch.device("cpu"),
    )
    return CudaSpeculativeWorker(device, runner, sampler, buffers, speculator, buckets)


def plain_asks() -> list[Ask]:
    """Requests long enough for whole blocks of drafts, without penalties, bias or banned ends."""
    rng = np.random.default_rng(6)
    sampled = SamplingParams(temperature=0.7, seed=12, top_k=50)
    greedy = SamplingParams(temperature=0.0)
    return [
        Ask([0, *rng.integers(3, 500, 11).tolist()], 12, greedy),
        Ask([0, *rng.integers(3, 500, 4).tolist()], 12, sampled),
        Ask([0, *rng.integers(3, 500, 17).tolist()], 12, greedy),
    ]


def asks() -> list[Ask]:
    """Prompts of several chunks and of one token; greedy, sampled, with penalties, bias and banned ends."""
    rng = np.random.default_rng(5)

    def prompt(length: int) -> list[int]:
        return [0, *rng.integers(3, 500, length - 1).tolist()]

    greedy = SamplingParams(temperature=0.0)
    sampled = SamplingParams(temperature=1.0, seed=11, top_k=40, top_p=0.9)
    repeated = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)
    present = SamplingParams(temperature=0.8, seed=4, presence_penalty=1.0, min_p=0.01)
    biased = SamplingParams(temperature=0.0, logit_bias={1: 30.0, 9: 2.0})
    return [
        Ask(prompt(60), 3, greedy),
        Ask([0], 5, greedy),
        Ask(prompt(17), 5, sampled),
        Ask(prompt(20), 5, repeated),
        Ask(prompt(3), 5, present),
        Ask(prompt(5), 7, biased, 3),
    ]
