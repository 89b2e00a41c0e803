"""Does every slot that a step attends to hold the token and position it stands for?

The memory of the fake model: FULL pages and two window rings per request slot (layers before and
from the last KV source on, whose rows differ under decoder replay). Each entry is the (token id,
position) it stands for, and is compared with what the request's ids are by its prompt and the
fake model's own samples, never by what a plan says.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsserve.kv.layout import TOKEN_RING, WINDOW_SLACK
from dsserve.worker.fake_plan import FakePlan, Ints, SlotCheckError

_OVERSHOOT = 32
"""Positions past the context length that steps in flight may still compute."""


@dataclass(slots=True)
class RequestRecord:
    """The true ids of a request: its prompt, and its output while it holds no slot."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    slot: int = 0


class WindowRing:
    """(token id, position) of the last rows of each slot, for one half of the layers.

    It holds a few rows more than the window, so that rejected drafts destroy none that is visible.
    """

    def __init__(self, name: str, *, num_slots: int, window: int) -> None:
        self.name = name
        self.window, self._num_rows = window, window + WINDOW_SLACK
        self.token = np.full((num_slots, self._num_rows), -1, np.int32)
        self.position = np.full((num_slots, self._num_rows), -1, np.int32)

    def clear(self, slot: int) -> None:
        """Forget what an earlier request left."""
        self.position[slot] = -1

    def check(self, plan: FakePlan, truth: NDArray[np.int32], first: Ints, floor: Ints) -> None:
        """Check the rows that come before each request's row at `first` in its window.

        Args:
            plan: The step.
            truth: [slots, positions] true ids.
            first: [B] position of the first row computed in this half of the layers.
            floor: [B] nothing below is visible.
        """
        want = first[:, None] - np.arange(1, self.window)
        slot, entry = plan.slot[:, None], want % self._num_rows
        position, token = self.position[slot, entry], self.token[slot, entry]
        wrong = (position != want) | (token != truth[slot, np.maximum(want, 0)])
        wrong &= want >= np.maximum(floor, 0)[:, None]
        if wrong.any():
            request, column = np.argwhere(wrong)[0]
            at = want[request, column]
            raise SlotCheckError(
                f"{plan.describe(request)}: {self.name} window entry {entry[request, column]} must "
                f"hold position {at}, token {truth[plan.slot[request], at]}; it holds position "
                f"{position[request, column]}, token {token[request, column]}"
            )

    def write(self, plan: FakePlan, first: Ints, token_ids: Ints) -> None:
        """Write the rows from `first` on; of more than the ring holds the last stay."""
        kept = np.maximum(first, plan.end - self._num_rows)[plan.row_request]
        rows = np.flatnonzero(plan.positions >= kept)
        slot, position = plan.slot[plan.row_request[rows]], plan.positions[rows]
        self.token[slot, position % self._num_rows] = token_ids[rows]
        self.position[slot, position % self._num_rows] = position


class FullPages:
    """(token id, position) of every row of every page, and each slot's page table."""

    def __init__(self, *, num_pages: int, page_size: int, num_slots: int, columns: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.token = np.full((num_pages + 1, page_size), -1, np.int32)
        self.position = np.full((num_pages + 1, page_size), -1, np.int32)
        self.page_table = np.zeros((num_slots, columns), np.int32)
        self._version = np.zeros(num_pages + 1, np.int64)
        self._num_users = np.zeros(num_pages + 1, np.int64)
        # What was found right before, so that a step only looks at what changed since.
        self._checked_page = np.zeros((num_slots, columns), np.int32)
        self._checked_version = np.zeros((num_slots, columns), np.int64)
        self._checked_rows = np.zeros((num_slots, columns), np.int32)

    def clear(self, slot: int) -> None:
        """Empty a slot's page table: its next request must bring every page."""
        np.subtract.at(self._num_users, self.page_table[slot], 1)
        self.page_table[slot] = 0
        self._checked_page[slot] = 0

    def apply_deltas(self, plan: FakePlan) -> None:
        """Write the plan's (slot, column, page) into the page tables."""
        num_slots, columns = self.page_table.shape
        for slot, column, page in plan.page_deltas.tolist():
            if not (0 < slot < num_slots and 0 <= column < columns and 0 < page <= self.num_pages):
                raise SlotCheckError(
                    f"step {plan.step_id}: page delta (slot {slot}, column {column}, page {page}) "
                    f"outside {num_slots} slots, {columns} columns, {self.num_pages} pages"
                )
            self._num_users[self.page_table[slot, column]] -= 1
            self._num_users[page] += 1
            self.page_table[slot, column] = page

    def write(self, plan: FakePlan, token_ids: Ints) -> None:
        """Write the rows at or above each request's write floor."""
        rows = np.flatnonzero(plan.positions >= plan.write_floor[plan.row_request])
        request, position = plan.row_request[rows], plan.positions[rows]
        page = self.page_table[plan.slot[request], position // self.page_size]
        wrong = np.flatnonzero((page == 0) | (self._num_users[page] != 1))
        if len(wrong):
            at = wrong[0]
            users = np.unique(np.argwhere(self.page_table == page[at])[:, 0]).tolist()
            raise SlotCheckError(
                f"{plan.describe(request[at])}: FULL row of position {position[at]} would be "
                f"written to page {page[at]}, which is in the tables of slots {users}"
            )
        self.token[page, position % self.page_size] = token_ids[rows]
        self.position[page, position % self.page_size] = position
        self._version[np.unique(page)] += 1

    def check(self, plan: FakePlan, truth: NDArray[np.int32]) -> None:
        """Check every row at [0, end) of every request; pages seen before cost one comparison."""
        columns = -(-plan.end // self.page_size)
        request = np.repeat(np.arange(len(columns)), columns)
        column = np.arange(len(request)) - np.repeat(np.cumsum(columns) - columns, columns)
        slot = plan.slot[request]
        page = self.page_table[slot, column]
        rows = np.minimum(self.page_size, plan.end[request] - column * self.page_size)
        is_new = (
            (self._checked_page[slot, column] != page)
            | (self._checked_version[slot, column] != self._version[page])
            | (self._checked_rows[slot, column] < rows)
            | (page == 0)
        )
        request, column, slot, page, rows = (
            part[is_new] for part in (request, column, slot, page, rows)
        )
        offset = np.arange(self.page_size)
        want = column[:, None] * self.page_size + offset
        expected = truth[slot[:, None], np.minimum(want, truth.shape[1] - 1)]
        position, token = self.position[page], self.token[page]
        wrong = (position != want) | (token != expected) | (page == 0)[:, None]
        wrong &= offset < rows[:, None]
        if wrong.any():
            i, at = np.argwhere(wrong)[0]
            raise SlotCheckError(
                f"{plan.describe(request[i])}: FULL column {column[i]} is page {page[i]}, whose row "
                f"{at} must hold position {want[i, at]}, token {expected[i, at]}; it holds position "
                f"{position[i, at]}, token {token[i, at]}"
            )
        self._checked_page[slot, column] = page
        self._checked_version[slot, column] = self._version[page]
        self._checked_rows[slot, column] = rows


class SlotMemory:
    """All device state of the fake model, and the checks of one step.

    Everything is called from the worker's stream.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        columns: int,
        window: int,
        context_length: int,
    ) -> None:
        self.window = window
        self.records: dict[int, RequestRecord] = {}
        self.truth = np.zeros((num_slots, context_length + _OVERSHOOT), np.int32)
        self.truth_len = np.zeros(num_slots, np.int64)
        self.pages = FullPages(
            num_pages=num_pages, page_size=page_size, num_slots=num_slots, columns=columns
        )
        self.encoder = WindowRing("encoder", num_slots=num_slots, window=window)
        self.decoder = WindowRing("decoder", num_slots=num_slots, window=window)
        self.ring_token = np.full((num_slots, TOKEN_RING), -1, np.int32)
        self.ring_position = np.full((num_slots, TOKEN_RING), -1, np.int32)
        self._request_of = np.zeros(num_slots, np.uint64)
        self._next_position = np.zeros(num_slots, np.int64)
        self._hit = np.zeros(num_slots, np.int64)
        self._window_floor = np.zeros(num_slots, np.int64)
        self._tail_floor = np.full(num_slots, -1, np.int64)

    def admit(self, request_id: int, prompt: NDArray[np.uint32]) -> None:
        """Learn a request's prompt."""
        self.records[request_id] = RequestRecord(prompt.astype(np.int32))

    def forget(self, request_id: int) -> None:
        """Drop an ended request; its slot stays bound until a plan releases it."""
        self.records.pop(request_id, None)

    def run(self, plan: FakePlan) -> None:
        """Do what the device does in a step before sampling, checking all it reads and writes.

        Raises:
            SlotCheckError: Something is wrong; the message says where.
        """
        for slot in plan.released_slots.tolist():
            self._release(slot)
        self.pages.apply_deltas(plan)
        for request in np.flatnonzero(self._request_of[plan.slot] != plan.request_id).tolist():
            self._bind(plan, request)
        self._check_progress(plan)
        token_ids = self._resolve(plan)
        self._check_history(plan)
        self.encoder.check(plan, self.truth, plan.start, plan.window_floor)
        self.pages.write(plan, token_ids)
        self.pages.check(plan, self.truth)
        self.encoder.write(plan, plan.start, token_ids)
        self._run_tail(plan, token_ids)
        self._next_position[plan.slot] = plan.end

    def located(self, plan: FakePlan) -> FakePlan:
        """The plan with rows that continue an output at their true positions, which lie at or before its own.

        Raises:
            SlotCheckError: They lie behind, so that pages may be missing.
        """
        anchor = np.where(plan.is_decode, self.truth_len[plan.slot] - 1, plan.start)
        wrong = np.flatnonzero(anchor > plan.start)
        if len(wrong):
            at = wrong[0]
            raise SlotCheckError(
                f"{plan.describe(at)}: starts before position {anchor[at]}, the newest token"
            )
        return plan.moved_to(anchor)

    def run_rejected(self, plan: FakePlan, token_ids: Ints) -> None:
        """Leave behind what rejected drafts write: pages and windows, at positions beyond all that is valid."""
        self.pages.write(plan, token_ids)
        self.encoder.write(plan, plan.start, token_ids)
        self.decoder.write(plan, plan.start, token_ids)

    def context(self, plan: FakePlan, length: int) -> Ints:
        """The last `length` ids of each request, oldest first; -1 before its start."""
        want = plan.end[:, None] + np.arange(-length, 0)
        ids = self.truth[plan.slot[:, None], np.maximum(want, 0)]
        return np.where(want >= 0, ids, -1).astype(np.int64)

    def append(self, plan: FakePlan, token_ids: Ints) -> None:
        """Write each sampling request's next token into its token ring and its true ids."""
        slot, position = plan.slot[plan.samples], plan.end[plan.samples]
        self.truth[slot, position] = token_ids[plan.samples]
        self.truth_len[slot] = np.maximum(self.truth_len[slot], position + 1)
        self.ring_token[slot, position % TOKEN_RING] = token_ids[plan.samples]
        self.ring_position[slot, position % TOKEN_RING] = position

    def _release(self, slot: int) -> None:
        request_id = int(self._request_of[slot])
        record = self.records.get(request_id)
        if record is not None:
            record.output = self.truth[slot, len(record.prompt) : self.truth_len[slot]].copy()
            record.slot = 0
        self._request_of[slot] = 0
        self.pages.clear(slot)

    def _bind(self, plan: FakePlan, request: int) -> None:
        request_id, slot = int(plan.request_id[request]), int(plan.slot[request])
        where = plan.describe(request)
        record = self.records.get(request_id)
        if record is None:
            raise SlotCheckError(f"{where}: the worker was not told of this request")
        if not 0 < slot < len(self._request_of) or self._request_of[slot] != 0:
            raise SlotCheckError(f"{where}: the slot is not free")
        if record.slot:
            raise SlotCheckError(f"{where}: the request also holds slot {record.slot}")
        hit, replay = int(plan.cached_len[request]), int(plan.replay_len[request])
        if replay != min(hit, self.window) or plan.start[request] != hit - replay:
            raise SlotCheckError(
                f"{where}: a hit of {hit} must replay {min(hit, self.window)} rows, not {replay}, "
                f"and start at {hit - min(hit, self.window)}"
            )
        if 0 < hit <= self.window or hit % self.pages.page_size:
            raise SlotCheckError(f"{where}: a hit of {hit} tokens must not be taken")
        ids = np.concatenate([record.prompt, record.output])
        self.truth[slot, : len(ids)] = ids
        self.truth_len[slot] = len(ids)
        self.encoder.clear(slot)
        self.decoder.clear(slot)
        self.ring_position[slot] = -1
        record.slot = slot
        self._request_of[slot] = request_id
        self._next_position[slot] = plan.start[request]
        self._hit[slot] = hit
        self._window_floor[slot] = hit - replay
        self._tail_floor[slot] = -1

    def _check_progress(self, plan: FakePlan) -> None:
        slot, hit = plan.slot, self._hit[plan.slot]
        self._require(plan, plan.start, self._next_position[slot], "start_position")
        self._require(plan, plan.write_floor, hit, "write_floor")
        self._require(plan, plan.cached_len, hit, "cached_len")
        self._require(plan, plan.window_floor, self._window_floor[slot], "window_floor")
        is_first = plan.start == hit - np.minimum(hit, self.window)
        replay = np.where(is_first, np.minimum(hit, self.window), 0)
        self._require(plan, plan.replay_len, replay, "replay_len")
        open_end = plan.end[~plan.samples] % self.pages.page_size
        if open_end.any():
            request = np.flatnonzero(~plan.samples)[np.flatnonzero(open_end)[0]]
            raise SlotCheckError(f"{plan.describe(request)}: an open chunk ends inside a page")

    def _require(self, plan: FakePlan, found: Ints, expected: Ints, field_name: str) -> None:
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            at = wrong[0]
            raise SlotCheckError(
                f"{plan.describe(at)}: {field_name} is {found[at]}, must be {expected[at]}"
            )

    def _resolve(self, plan: FakePlan) -> Ints:
        """Fill placeholders from the token ring, then compare all rows with the true ids."""
        token_ids, slot = plan.token_ids.copy(), plan.slot[plan.row_request]
        rows = np.flatnonzero(token_ids == -1)
        entry = plan.positions[rows] % TOKEN_RING
        token_ids[rows] = self.ring_token[slot[rows], entry]
        is_stale = self.ring_position[slot[rows], entry] != plan.positions[rows]
        expected = self.truth[slot, plan.positions]
        wrong = (token_ids != expected) | (plan.positions >= self.truth_len[slot])
        wrong[rows] |= is_stale
        if wrong.any():
            row = np.flatnonzero(wrong)[0]
            request, position = plan.row_request[row], plan.positions[row]
            raise SlotCheckError(
                f"{plan.describe(request)}: the row at position {position} has token "
                f"{token_ids[row]} (plan {plan.token_ids[row]}), must have {expected[row]} of "
                f"{self.truth_len[plan.slot[request]]} known ids"
            )
        return token_ids

    def _check_history(self, plan: FakePlan) -> None:
        want = plan.start[:, None] + np.arange(-3, 0)
        ids = self.truth[plan.slot[:, None], np.maximum(want, 0)]
        expected = np.where(want >= 0, ids, -1)
        wrong = (plan.history_ids != expected).any(axis=1) & ~plan.is_decode
        if wrong.any():
            request = np.flatnonzero(wrong)[0]
            raise SlotCheckError(
                f"{plan.describe(request)}: history_ids {plan.history_ids[request].tolist()}, must "
                f"be {expected[request].tolist()}"
            )

    def _run_tail(self, plan: FakePlan, token_ids: Ints) -> None:
        """The layers from the last KV source on, which run the last `tail_len` rows only."""
        has_tail = plan.tail_len > 0
        first = plan.end - plan.tail_len
        window_floor = self._window_floor[plan.slot]
        cut_floor = np.maximum(window_floor, plan.end - self.window)
        known = self._tail_floor[plan.slot]
        is_whole = plan.tail_len == plan.lens
        allowed = np.where(
            known >= 0,
            plan.tail_floor == known,
            ((plan.tail_floor == cut_floor) & (plan.tail_len == np.minimum(plan.lens, self.window)))
            | ((plan.tail_floor == window_floor) & is_whole),
        )
        wrong = np.flatnonzero(has_tail & ~allowed)
        if len(wrong):
            at = wrong[0]
            raise SlotCheckError(
                f"{plan.describe(at)}: tail_len {plan.tail_len[at]} with tail_floor "
                f"{plan.tail_floor[at]}; the window floor is {window_floor[at]}, the tail floor "
                f"before was {known[at]}"
            )
        out_of_reach = np.where(has_tail, plan.tail_floor, np.iinfo(np.int64).max)
        self.decoder.check(plan, self.truth, first, out_of_reach)
        self.decoder.write(plan, np.where(has_tail, first, plan.end), token_ids)
        self._tail_floor[plan.slot[has_tail]] = plan.tail_floor[has_tail]
