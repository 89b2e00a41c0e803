"""A bench for the fake worker: plans written by hand, as a careful scheduler would write them."""

import numpy as np

from dsserve.protocol.engine import SamplingParams
from dsserve.worker.base import PHASE_DECODE, PHASE_PREFILL, AdmittedRequest
from dsserve.worker.fake import FakeWorker

PAGE, WINDOW = 4, 8
CAPACITY = {
    "requests": 8,
    "rows": 64,
    "deltas": 64,
    "slots": 9,
    "columns": 16,
    "pages": 40,
    "page_size": PAGE,
}
PROMPT = [10 + i for i in range(13)]


class Model:
    """What the worker reads of a model configuration."""

    vocab_size = 512
    sliding_window = WINDOW

    def __init__(self, **fake):
        self.fake = fake


class Bench:
    """A fake worker and a careful hand that writes plans for it, as a scheduler would."""

    def __init__(self, **fake):
        self.slept = []
        self.worker = FakeWorker(
            Model(**fake), CAPACITY, context_length=60, sleep=self.slept.append, clock=lambda: 0.0
        )
        self.step_id = 0
        self.next_page = 1
        self.tables = {}

    def admit(self, request_id, prompt, script=None):
        self.worker.admit(
            [
                AdmittedRequest(
                    request_id=request_id,
                    sampling=SamplingParams(),
                    prompt_token_ids=np.array(prompt, np.uint32),
                    stop_token_ids=(),
                    min_new_tokens=0,
                    ignore_eos=False,
                    script=script,
                )
            ]
        )

    def pages_for(self, slot, end, shared=()):
        """Give the slot the pages it lacks for [0, end); returns the deltas."""
        table, deltas = self.tables.setdefault(slot, []), []
        for page in shared:
            deltas.append((slot, len(table), page))
            table.append(page)
        while len(table) * PAGE < end:
            deltas.append((slot, len(table), self.next_page))
            table.append(self.next_page)
            self.next_page += 1
        return deltas

    def prefill(self, request_id, slot, ids, start, end, *, is_last=True, hit=0, shared=(), **over):
        replay = min(hit, WINDOW) if start < hit else 0
        floor = hit - min(hit, WINDOW)
        tail = min(WINDOW, end - start) if is_last else 0
        row = {
            "request_id": request_id,
            "slot": slot,
            "start": start,
            "ids": list(ids[start:end]),
            "cached_len": hit,
            "replay_len": replay,
            "tail_len": tail,
            "window_floor": floor,
            "write_floor": hit,
            "tail_floor": max(floor, end - WINDOW) if is_last else 0,
            "samples": int(is_last),
            "history": [ids[p] if p >= 0 else -1 for p in range(start - 3, start)],
            "deltas": self.pages_for(slot, end, shared),
        }
        return row | over

    def decode(self, request_id, slot, position, *, hit=0, tail_floor=0, token=-1, **over):
        row = {
            "request_id": request_id,
            "slot": slot,
            "start": position,
            "ids": [token],
            "cached_len": hit,
            "replay_len": 0,
            "tail_len": 1,
            "window_floor": hit - min(hit, WINDOW),
            "write_floor": hit,
            "tail_floor": tail_floor,
            "samples": 1,
            "history": [-2, -2, -2],
            "deltas": self.pages_for(slot, position + 1),
        }
        return row | over

    def launch(self, *rows, released=(), phase=None, **header):
        self.step_id += 1
        set_index = self.step_id % 3
        buffers = self.worker.buffer_sets()[set_index]
        lens = [len(row["ids"]) for row in rows]
        deltas = [delta for row in rows for delta in row["deltas"]]
        ends = [row["start"] + len(row["ids"]) for row in rows]
        is_decode = all(row["history"] == [-2, -2, -2] for row in rows)
        values = {
            "step_id": self.step_id,
            "phase": phase or (PHASE_DECODE if is_decode else PHASE_PREFILL),
            "requests": len(rows),
            "rows": sum(lens),
            "deltas": len(deltas),
            "tail": sum(row["tail_len"] for row in rows),
            "released": len(released),
            "sampling": sum(row["samples"] for row in rows),
            "max_len": max(ends),
        } | header
        buffers["header"][:9] = list(values.values())
        buffers["cu_seqlens"][: len(rows) + 1] = np.cumsum([0, *lens])
        for field, name in (("request_slot", "slot"), ("start_position", "start")):
            buffers[field][: len(rows)] = [row[name] for row in rows]
        for field in ("request_id", "cached_len", "replay_len", "tail_len", "window_floor"):
            buffers[field][: len(rows)] = [row[field] for row in rows]
        for field in ("write_floor", "tail_floor", "samples"):
            buffers[field][: len(rows)] = [row[field] for row in rows]
        buffers["history_ids"][: len(rows)] = [row["history"] for row in rows]
        buffers["token_ids"][: sum(lens)] = [token for row in rows for token in row["ids"]]
        positions = [row["start"] + i for row in rows for i in range(len(row["ids"]))]
        buffers["positions"][: sum(lens)] = positions
        buffers["page_deltas"][: len(deltas)] = np.array(deltas).reshape(-1, 3)
        buffers["released_slots"][: len(released)] = list(released)
        return self.worker.launch(set_index)

    def run(self, *rows, **header):
        return self.launch(*rows, **header).wait()


def generate(bench, count, prompt=PROMPT, request_id=1, slot=1):
    """Prefill in one chunk, then decode with ids read from the token ring."""
    bench.admit(request_id, prompt)
    n = len(prompt)
    result = bench.run(bench.prefill(request_id, slot, prompt, 0, n))
    out = [int(result.token_ids[0])]
    floor = max(0, n - WINDOW)
    for i in range(count - 1):
        result = bench.run(bench.decode(request_id, slot, n + i, tail_floor=floor))
        out.append(int(result.token_ids[0]))
    return out
