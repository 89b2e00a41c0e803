"""TokenSpeed's C++ scheduler: its prefix cache seen through whole requests, and its steps."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

from benchmarks.peers.schedulers import SchedulerKind
from benchmarks.peers.sizes import PAGE_SIZE
from benchmarks.peers.trees import CacheKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from benchmarks.peers.sizes import Sizes

NAME = "TokenSpeed"
GROUP = "full"
LONG_ID = "long"
PREFILL_ALL = 1 << 20


def tokenspeed_kinds() -> tuple[CacheKind, SchedulerKind]:
    """Return its cache and its scheduler.

    Raises:
        ImportError: It is not installed.
    """
    module = importlib.import_module("tokenspeed_scheduler")
    return (
        CacheKind(NAME, lambda tokens: TokenSpeedCache(module, tokens), is_whole_request=True),
        SchedulerKind(NAME, lambda running, sizes: TokenSpeedSteps(module, running, sizes)),
    )


class TokenSpeedCache:
    """One request at a time: `match` submits and plans it, `insert` gives its result and ends it."""

    def __init__(self, module: Any, num_tokens: int) -> None:
        self._module = module
        # A page for the token after the prompt, and the page that is never used.
        num_pages = num_tokens // PAGE_SIZE + 2
        self._scheduler = _scheduler(module, num_pages, batch=1, tokens=PREFILL_ALL, mixed=False)
        self._number = 0

    def key(self, tokens: NDArray[np.uint32]) -> Any:
        """Return the request; its list of ids was converted here, outside of the clock."""
        self._number += 1
        return _request(self._module, f"r{self._number}", tokens, 1)

    def match(self, key: Any) -> Any:
        """Admission: hashes, match, eviction, pages."""
        self._scheduler.submit_requests([key])
        return self._scheduler.next_execution_plan()

    def cached_len(self, found: Any) -> int:
        """Return where the prefill starts."""
        return int(found.forward[0].extend_prefix_lens[0])

    def insert(self, key: Any, found: Any) -> None:
        """Result and end."""
        del found
        forward = self._module.ForwardEvent
        event = self._module.ExecutionEvent()
        result, end = forward.ExtendResult(), forward.Finish()
        result.request_id = end.request_id = key.request_id
        result.tokens = [7]
        event.add_event(result)
        event.add_event(end)
        self._scheduler.advance(event)

    def evict(self, num_tokens: int) -> None:
        """Nothing: an admission evicts what it needs."""


class TokenSpeedSteps:
    """Running requests; a plan is followed by its result."""

    def __init__(self, module: Any, running: int, sizes: Sizes) -> None:
        self._module = module
        new_tokens = sizes.tokens_of_steps
        pages = running * ((sizes.prompt_tokens + new_tokens) // PAGE_SIZE + 2)
        self._new_tokens = new_tokens
        self._lengths: dict[str, int] = {}
        self._scheduler = _scheduler(
            module,
            pages + 2 * (sizes.long_tokens // PAGE_SIZE + 2),
            batch=running + 1,
            tokens=sizes.chunk + running,
            mixed=True,
        )
        self._long = ""
        self.is_prefilling = False

    def start(self, prompts: list[NDArray[np.uint32]]) -> None:
        """Submit the prompts and run until all decode."""
        self._lengths = {f"r{number}": prompt.size for number, prompt in enumerate(prompts)}
        self._scheduler.submit_requests(
            [
                _request(self._module, f"r{number}", prompt, self._new_tokens)
                for number, prompt in enumerate(prompts)
            ]
        )
        self.step()
        while self.is_prefilling:
            self.step()

    def step(self) -> tuple[int, int]:
        """Return ns of the plan, and of its result; reading the plan is outside of the clock."""
        clock = time.thread_time_ns
        started = clock()
        plan = self._scheduler.next_execution_plan()
        planned = clock()
        self.is_prefilling = False
        results = []
        for batch in plan.forward:
            results += self._results(batch)
        if not results:
            raise RuntimeError("TokenSpeed planned nothing although requests run")
        reading = clock()
        event = self._module.ExecutionEvent()
        extend = self._module.ForwardEvent.ExtendResult
        for request_id, tokens in results:
            result = extend()
            result.request_id = request_id
            result.tokens = tokens
            event.add_event(result)
        self._scheduler.advance(event)
        return planned - started, clock() - reading

    def _results(self, batch: Any) -> list[tuple[str, list[int]]]:
        """Return an id and its new tokens; a chunk that is not the last of its prompt has none."""
        ids = batch.request_ids
        num_extends = batch.num_extends()
        if not num_extends:
            return [(request_id, [7]) for request_id in ids]
        self.is_prefilling = True
        results = [(request_id, [7]) for request_id in ids]
        for position, (prefix, length) in enumerate(
            zip(batch.extend_prefix_lens, batch.input_lengths, strict=False)
        ):
            if prefix + length < self._lengths[ids[position]]:
                results[position] = (ids[position], [])
        return results

    def arrive(self, prompt: NDArray[np.uint32]) -> tuple[int, int]:
        """Submit the long prompt; returns ns of the submission and of the plan that admits it."""
        self._long = f"{LONG_ID}{time.perf_counter_ns()}"
        self._lengths[self._long] = prompt.size
        request = _request(self._module, self._long, prompt, 1000)
        started = time.thread_time_ns()
        self._scheduler.submit_requests([request])
        submitted = time.thread_time_ns() - started
        return submitted, self.step()[0]

    def end_long(self) -> None:
        """End it."""
        event = self._module.ExecutionEvent()
        end = self._module.ForwardEvent.Finish()
        end.request_id = self._long
        event.add_event(end)
        self._scheduler.advance(event)
        self.step()

    def check(self) -> None:
        """Nothing to check."""


def _request(module: Any, request_id: str, tokens: NDArray[np.uint32], new_tokens: int) -> Any:
    request = module.RequestSpec()
    request.request_id = request_id
    request.tokens = tokens.tolist()
    request.max_new_tokens = new_tokens
    return request


def _scheduler(module: Any, num_pages: int, *, batch: int, tokens: int, mixed: bool) -> Any:
    config = module.SchedulerConfig()
    config.prefix_granularity = PAGE_SIZE
    config.num_device_pages = num_pages
    config.num_snapshot_pages = config.num_host_pages = 1  # the page that is never used
    config.max_batch_size = batch
    config.max_scheduled_tokens = tokens
    config.disable_l2_cache = True
    config.enable_mixed_prefill_decode = mixed
    config.cache_groups = [
        module.CacheGroupConfig(GROUP, PAGE_SIZE, num_pages, module.AttnKind.Full)
    ]
    return module.Scheduler(config)
