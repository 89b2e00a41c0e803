"""Does the engine stay whole under hours of everything at once? `python -m benchmarks.soak --seconds 1800`.

A real engine process with the fake model, driven over its sockets: random arrivals of prompts that share
prefixes, priorities, deadlines, aborts and stop strings, with too little memory for all of them. The fake
model checks every slot that a step reads; a sample of the outputs is compared with what each request gets
alone. In the end nothing may be left: no request, no page, no slot, no growing memory, and at no time may
something have waited while nothing could be planned (S8). Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsserve.config.server import ServerConfig
from dsserve.engine.supervisor import EngineSupervisor
from dsserve.errors import DsserveError, EngineLost
from dsserve.frontend.client import EngineClient
from dsserve.protocol import engine as wire
from dsserve.worker.fake_model import fake_output

MODEL_PATH = Path(__file__).resolve().parents[1] / "tests" / "golden" / "data" / "v41-tiny-a"
TICK_S = 0.005
MAX_OPEN = 3000
"""Requests open at once; while so many are, none arrives: then the rate is what the machine gives."""
CHECKED_SHARE = 0.05
WARM_UP_SHARE = 0.2
MAX_GROWTH_BYTES = 48 * 2**20
NUM_FAMILIES, SYSTEM_LEN = 12, 160
OUTPUT_LENS = ((0, 1, 2, 4, 8, 8, 16, 60), (0, 1, 8, 30, 300))
"""Many that come and go, then some that outgrow the memory together: retractions for want of pages."""
MOOD_S = 10.0
"""How long outputs are drawn from the same lengths."""
PRESSED_AFTER_S = 120.0
"""A run of this length has retractions for want of pages."""

FLAGS: dict[str, Any] = {
    "load_format": "fake",
    "page_size": 4,
    "max_total_tokens": 3072,
    "max_running_requests": 96,
    "max_queued_requests": 2500,
    "enable_mixed_chunk": True,
    "schedule_policy": "lpm",
    "schedule_conservativeness": 0.01,
    "enable_priority_scheduling": True,
    "priority_scheduling_preemption_threshold": 8,
    "fair_by": "user",
    "request_waiting_timeout": 20.0,
    "log_level": "warning",
}


@dataclass
class Soak:
    """One run.

    Attributes:
        ends: How requests ended, by finish code or rejection code.
        problems: What must not be; empty if all is well.
    """

    client: EngineClient
    random: random.Random
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_sent: int = 0
    num_checked: int = 0
    num_tokens: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def drive(self, seconds: float, rate: float) -> None:
        """Submit requests at random times, `rate` a second on average, for so long."""
        until_s = time.monotonic() + seconds
        due = 0.0
        last_s = time.monotonic()
        while (now_s := time.monotonic()) < until_s and not self.problems:
            due += (now_s - last_s) * rate * self.random.uniform(0.2, 1.8)
            last_s = now_s
            while due >= 1 and len(self._tasks) < MAX_OPEN:
                due -= 1
                self._submit()
            due = min(due, rate * 0.1)
            await asyncio.sleep(TICK_S)

    async def drain(self) -> None:
        """Wait for every request to end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=120)
        for _ in self._tasks:
            self.problems.append("a request did not end within 120 s")

    def _submit(self) -> None:
        self.num_sent += 1
        task = asyncio.create_task(self._one(self.num_sent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, number: int) -> None:
        chance = self.random
        prompt = self._prompt()
        now_s = time.monotonic()
        request = wire.EngineRequest(
            request_id=self.client.next_request_id(),
            token_ids=wire.pack_u32(prompt),
            max_new_tokens=chance.choice(OUTPUT_LENS[int(now_s / MOOD_S) % len(OUTPUT_LENS)]),
            ignore_eos=chance.random() < 0.05,
            priority=chance.choice((None, 0, 0, 1, 5, 10)),
            tenant=f"tenant {chance.randrange(5)}",
            deadline_s=now_s + chance.expovariate(1) if chance.random() < 0.1 else None,
            arrival_s=now_s,
        )
        leaves_after = chance.randrange(8) if chance.random() < 0.08 else None
        stops_after = chance.randrange(1, 8) if chance.random() < 0.08 else None
        ids: list[int] = []
        try:
            async with self.client.submit(request) as stream:
                async for delta in stream:
                    ids += delta.token_ids
                    if delta.finish_code is not wire.FinishCode.NONE:
                        self._ended(number, prompt, ids, delta.finish_code)
                        return
                    if leaves_after is not None and len(ids) >= leaves_after:
                        self.ends["client left"] += 1
                        return
                    if stops_after is not None and len(ids) >= stops_after:
                        self.client.finish(request.request_id, stops_after)
            self.problems.append(f"request {number} ended without a word")
        except DsserveError as error:
            self.ends[error.code] += 1
            if error.status >= 500 and error.code not in ("queue_full", "deadline_exceeded"):
                self.problems.append(f"request {number}: {error.code}: {error}")

    def _prompt(self) -> list[int]:
        chance = self.random
        family = chance.randrange(NUM_FAMILIES)
        shared = [
            3 + (family * 31 + index * 7) % 90 for index in range(chance.randrange(SYSTEM_LEN))
        ]
        return shared + [chance.randrange(3, 97) for _ in range(chance.randrange(1, 60))]

    def _ended(self, number: int, prompt: list[int], ids: list[int], code: wire.FinishCode) -> None:
        self.ends[code.name.lower()] += 1
        self.num_tokens += len(ids)
        if code in (wire.FinishCode.ERROR_NAN, wire.FinishCode.ERROR_INTERNAL):
            self.problems.append(f"request {number} ended with {code.name}")
        if self.random.random() < CHECKED_SHARE:
            self.num_checked += 1
            if ids != fake_output(prompt, len(ids)):
                self.problems.append(f"request {number} got other ids than alone")


async def run(seconds: float, rate: float, seed: int) -> int:
    """Run a soak and print what came of it; returns the exit code."""
    config = ServerConfig(model_path=str(MODEL_PATH), **FLAGS)
    supervisor = EngineSupervisor(
        config, on_exit=lambda code: client.fail_all(EngineLost(f"the engine ended with {code}"))
    )
    client = EngineClient(supervisor.ipc_dir)
    await client.start()
    await supervisor.start()
    try:
        await asyncio.wait_for(client.wait_ready(), 60)
        soak = Soak(client, random.Random(seed))
        started_s = time.monotonic()
        await soak.drive(seconds * WARM_UP_SHARE, rate)
        warm_bytes = _resident_bytes(supervisor.process_id)
        await soak.drive(seconds * (1 - WARM_UP_SHARE), rate)
        driven_s = time.monotonic() - started_s
        await soak.drain()
        stats = await _check_end(client, soak)
        num_pressed = stats["retracted_total"] - stats["preempted_total"]
        if driven_s > PRESSED_AFTER_S and not num_pressed:
            soak.problems.append("nothing was retracted for want of pages")
        end_bytes = _resident_bytes(supervisor.process_id)
        if end_bytes - warm_bytes > MAX_GROWTH_BYTES:
            soak.problems.append(f"the engine grew from {warm_bytes} to {end_bytes} bytes")
    finally:
        client.shutdown(grace_s=0)
        await supervisor.stop(timeout_s=20)
        await client.close()
    _report(soak, stats, driven_s, warm_bytes, end_bytes)
    return 1 if soak.problems else 0


async def _check_end(client: EngineClient, soak: Soak) -> dict[str, Any]:
    """Nothing may be left but the tree, and after a flush not even that."""
    try:
        async with asyncio.timeout(60):
            while (state := await client.query_state())["num_live_requests"]:  # noqa: ASYNC110 - the engine does not say when it becomes idle
                await asyncio.sleep(0.1)
    except TimeoutError:
        soak.problems.append("the engine still holds requests")
        state = await client.query_state()
    for pool in state["pools"]:
        if pool["free"] + pool["evictable"] != pool["capacity"]:
            soak.problems.append(f"units are missing: {pool}")
    is_flushed, holders = await client.flush()
    after = await client.query_state()
    if not is_flushed or any(pool["free"] != pool["capacity"] for pool in after["pools"]):
        soak.problems.append(f"the flush left something: {holders} {after['pools']}")
    stats: dict[str, Any] = state["stats"] | state["loop"]
    if stats["no_progress_passes"]:
        soak.problems.append(f"S8: {stats['no_progress_passes']} passes without any plan")
    if stats["illegal_moves_total"]:
        soak.problems.append(f"{stats['illegal_moves_total']} illegal moves")
    return stats


def _resident_bytes(process_id: int | None) -> int:
    status = Path(f"/proc/{process_id}/status").read_text().splitlines()
    [line] = [line for line in status if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def _report(
    soak: Soak, stats: dict[str, Any], driven_s: float, warm_bytes: int, end_bytes: int
) -> None:
    names = (
        "admitted_total retracted_total preempted_total stalled_rows_total held_back_total rematches_total "
        "evicted_pages_total prefill_steps_total decode_steps_total generated_tokens_total"
    )
    lines = [
        f"{soak.num_sent} requests in {driven_s:.0f} s: {soak.num_sent / driven_s:.0f} a second",
        f"ends: {dict(sorted(soak.ends.items()))}",
        f"outputs compared with those alone: {soak.num_checked}",
        *(f"{name}: {int(stats[name])}" for name in names.split()),
        f"passes without a plan (S8): {stats['no_progress_passes']}",
        f"seconds of the step loop by stage: {stats['scheduler_stage_seconds']}",
        f"resident memory of the engine: {warm_bytes >> 20} MiB warm, {end_bytes >> 20} MiB at the end",
        *(f"PROBLEM: {problem}" for problem in soak.problems[:20]),
        "FAILED" if soak.problems else "ok: nothing leaked",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--rate", type=float, default=2000, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    return asyncio.run(run(arguments.seconds, arguments.rate, arguments.seed))


if __name__ == "__main__":
    sys.exit(main())
