"""Types of the extension module `dsserve._native` (compared with the build by stubtest)."""

from os import PathLike
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

class SchedulerError(Exception):
    """A wrong call of the scheduler (configuration, buffers, order of steps); never a bad request."""

class InvariantError(SchedulerError):
    """`check_invariants` found the accounting broken: a bug, the engine process must end."""

@final
class StepSummary:
    """What `next_plan` put into a buffer set.

    `phase` is 1 (PREFILL), 2 (DECODE) or 3 (VERIFY). Row counts: `num_rows` is all rows of the step,
    `num_replay_rows` those of encoder replay, `num_tail_rows` those that run the decoder half,
    `num_prefill_tokens` prompt rows computed for the first time, `num_cached_tokens` the hits of
    the requests admitted in this step, `num_draft_tokens` drafts to verify. `admitted` holds the ids of requests that got a slot.
    """

    @property
    def step_id(self) -> int: ...
    @property
    def phase(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_replay_rows(self) -> int: ...
    @property
    def num_tail_rows(self) -> int: ...
    @property
    def num_prefill_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def admitted(self) -> list[int]: ...

@final
class StepOutputs:
    """New tokens and terminal states of `len` requests, arrays as little-endian bytes.

    `request_ids` u64[n], `token_offsets` u32[n+1] into `token_ids` u32[], `finish_codes` u8[n]
    (`protocol.engine.FinishCode`, 0 = goes on), `prompt_lens`, `cached_lens`, `output_lens` u32[n].
    `output_lens` counts all tokens of the request so far. The stop token itself is emitted and
    counted. A request appears with a non-zero finish code exactly once.
    """

    @property
    def len(self) -> int: ...
    @property
    def request_ids(self) -> bytes: ...
    @property
    def token_offsets(self) -> bytes: ...
    @property
    def token_ids(self) -> bytes: ...
    @property
    def finish_codes(self) -> bytes: ...
    @property
    def prompt_lens(self) -> bytes: ...
    @property
    def cached_lens(self) -> bytes: ...
    @property
    def output_lens(self) -> bytes: ...

@final
class Scheduler:
    """Decides what runs in each step; owns the prefix cache and all accounting.

    Calls come from one thread. At most `max_steps_in_flight` steps may be planned and not applied;
    steps are applied in order.
    """

    def __new__(cls, config_json: str) -> Scheduler:
        """Build from the JSON of `SchedulerConfig`.

        Raises:
            SchedulerError: Naming every wrong field.
        """

    def plan_capacity(self) -> dict[str, int]:
        """Array lengths a buffer set needs: requests, rows, deltas, slots, columns."""

    def register_buffers(self, sets: list[dict[str, NDArray[Any]]]) -> None:
        """Register `max_steps_in_flight + 1` sets of C-contiguous writable arrays.

        Raises:
            SchedulerError: Naming set, field and what is wrong (missing, dtype, shape, layout).
        """

    def submit(self, specs: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
        """Queue requests; returns the rejected ones as (request_id, code, message).

        Keys: request_id, token_ids (bytes, u32 LE), max_new_tokens, and optionally min_new_tokens,
        ignore_eos, stop_token_ids (bytes, u32 LE), priority, tenant (u64, whom it is for),
        deadline_us (on the clock of `now_us`), needs_mask (its sampling waits for a mask), draft_len
        (draft tokens of its VERIFY rows; absent = the server's, 0 = none), extra_key, cache_salt,
        arrival_us, whole_extend, max_cached_len (most tokens to take from the cache), prompt_len (`token_ids` is the beginning of a prompt of that length:
        the rest comes through `extend_prompt`).

        Raises:
            SchedulerError: A key is missing, unknown or of a wrong type; nothing was queued.
        """

    def extend_prompt(
        self, request_id: int, token_ids: NDArray[np.uint32]
    ) -> tuple[int, str, str] | None:
        """Take the next ids of a prompt that was submitted in part; returns the rejection, if any.

        With the last of them the request joins the queue. Ids beyond its length are ignored, and so are
        those of a request that ended.
        """

    def next_plan(self, set_index: int, now_us: int) -> StepSummary | None:
        """Plan a step into buffer set `set_index`; None when nothing can run now.

        Raises:
            SchedulerError: Too many steps in flight, or the set is that of a step in flight.
        """

    def apply(
        self,
        step_id: int,
        token_ids: NDArray[np.int32],
        status: NDArray[np.uint8],
        now_us: int,
        num_ids: NDArray[np.uint32] | None = None,
    ) -> StepOutputs:
        """Take the results of the oldest step in flight (plan order, -1 where nothing is sampled).

        With `num_ids`, `token_ids` has a run of so many ids for each request, one after another: the
        accepted drafts and the id that follows them; 0 for requests that sampled nothing.

        Raises:
            SchedulerError: Not the oldest step in flight, or wrong array lengths.
        """

    def take_outputs(self) -> StepOutputs:
        """Terminal states that no step carries: aborts, stop strings, requests that cannot go on."""

    def abort(self, request_ids: list[int]) -> None:
        """End requests in any state; unknown ids are ignored (they ended already)."""

    def finish(self, request_id: int, kept_output_tokens: int) -> None:
        """End a request at a stop string: output past `kept_output_tokens` is dropped."""

    def flush(self) -> tuple[bool, list[int]]:
        """Empty the prefix cache; refused (False, ids of the requests that hold pages) while used."""

    def stats(self) -> dict[str, float]:
        """Levels and counters for the metrics."""

    def pool_table(self) -> list[dict[str, Any]]:
        """Per pool: name, unit, capacity, ownership, free, evictable, locked, private, quarantined.

        `promised` tells how many of the free and evictable ones are set aside for a prompt that is partly
        planned.
        """

    def check_invariants(self) -> None:
        """Check the accounting in full.

        Raises:
            InvariantError: Saying which equation does not hold.
        """

    def has_work(self) -> bool:
        """Whether any request is waiting, running or in a step in flight."""

    def steps_in_flight(self) -> int:
        """Steps planned and not yet applied."""

class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or a call has wrong arguments."""

@final
class Tokenizer:
    """A byte-level tokenizer (`tokenizer.json`) with its own threads; usable from any thread.

    Id arrays are bytes, u32 little-endian.
    """

    def __new__(
        cls,
        path: str | PathLike[str],
        num_threads: int = 1,
        *,
        backend: str = "auto",
        cache_bytes: int = 0,
    ) -> Tokenizer:
        """Load a `tokenizer.json`, or the one in a directory.

        `backend` is `huggingface` (the reference), `fastokens` (the fast encoder) or `auto` (the fast
        one where it knows the file's split pattern). `cache_bytes` limits the fast encoder's cache of
        encoded messages.

        Raises:
            TokenizerError: It cannot be read, is not byte-level, or is unknown to the fast encoder.
        """

    @property
    def backend(self) -> str: ...
    @property
    def fallback_reason(self) -> str | None: ...
    def cache_stats(self) -> dict[str, int]:
        """Return entries, bytes, hits and misses of the cache of encoded messages."""

    def encode_batch(self, texts: list[str], add_special: bool = True) -> list[bytes]:
        """Encode texts in parallel, with the same result as one by one.

        Raises:
            TokenizerError: A text cannot be encoded.
            UnicodeEncodeError: A text holds a lone surrogate.
        """

    def encode_rendered(self, prompt: str, special_ranges: list[tuple[int, int]]) -> bytes:
        """Encode a rendered prompt.

        Text in `special_ranges` (code point offsets) is tokens; all else is plain text, in which
        spellings of added tokens mean nothing. A range that is no token here is plain text.

        Raises:
            TokenizerError: A range is out of order or out of the prompt.
            UnicodeEncodeError: The prompt holds a lone surrogate.
        """

    def decode(self, ids: bytes, skip_special: bool = True) -> str:
        """Decode all ids at once; broken UTF-8 becomes U+FFFD, ids outside the vocabulary nothing."""

    def decode_each(self, ids: bytes, skip_special: bool = True) -> list[str]:
        """Decode each id by itself."""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the file."""

    def added_token_to_id(self, token: str) -> int | None:
        """Return the id of an added token (special or not) by its spelling."""

    def token_bytes(self, id: int) -> bytes:
        """Return what an id stands for, empty outside the vocabulary."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> list[int]: ...

@final
class Piece:
    """What a stream had to say after some ids.

    `stop` is the stop string or pattern that was found; the stream then takes no more ids.
    `kept_tokens` counts all ids so far, or those up to the one that completed the stop;
    `emitted_tokens` the leading ids all of whose text was given out.
    """

    @property
    def text(self) -> str: ...
    @property
    def stop(self) -> str | None: ...
    @property
    def kept_tokens(self) -> int: ...
    @property
    def emitted_tokens(self) -> int: ...

@final
class StepPieces:
    """As `Piece`, of all streams of a batch; `stops` by position, a text is None without a stream."""

    @property
    def texts(self) -> list[str | None]: ...
    @property
    def stops(self) -> dict[int, str]: ...
    @property
    def kept_tokens(self) -> list[int]: ...
    @property
    def emitted_tokens(self) -> list[int]: ...

@final
class StreamOptions:
    """How streams become text, with what stops them compiled; any number of streams may share it."""

    def __new__(
        cls,
        stop: list[str] = [],
        skip_special: bool = True,
        include_stop: bool = False,
        stop_regex: list[str] = [],
    ) -> StreamOptions:
        """Compile.

        Raises:
            TokenizerError: A stop string is empty, they are longer than 64 KiB together, or a stop
                pattern cannot be used.
            UnicodeEncodeError: A text holds a lone surrogate.
        """

@final
class StreamDecoder:
    """Incremental decoding of many streams, named by the caller."""

    def __new__(cls, tokenizer: Tokenizer) -> StreamDecoder: ...
    def open(self, name: int, options: StreamOptions | None = None) -> None:
        """Start a stream; without options nothing stops it and special tokens have no text.

        Raises:
            TokenizerError: An open stream has the name.
        """

    def push_batch(
        self, names: bytes, offsets: bytes, ids: bytes, ends: bytes | None = None
    ) -> StepPieces:
        """Give many streams their ids: names u64[n], offsets u32[n+1], ids u32[], ends u8[n].

        `ends` are finish codes: 0 goes on, 1 ended by its last id, a stop token, which has no text
        unless the stream includes stops; others ended. A stream that ended is forgotten.

        Raises:
            TokenizerError: The arrays do not fit; no stream was changed.
        """

    def finish(self, name: int) -> Piece:
        """End and forget a stream; returns what it held back.

        Raises:
            TokenizerError: The name is unknown.
        """

    def close(self, name: int) -> bool:
        """Forget a stream; False if there was none."""

    def __len__(self) -> int: ...

@final
class TokenAligner:
    """Places the ids of one stream in its text."""

    def __new__(cls, tokenizer: Tokenizer, skip_special: bool = True) -> TokenAligner: ...
    def push(self, ids: bytes) -> list[tuple[int, int, int]]:
        """Return (first byte, byte after the last, characters before) of each id (u32)."""

    def finish(self) -> tuple[int, int]:
        """Return the bytes that an incomplete character at the end takes, if there is one."""

class CacheError(Exception):
    """A wrong call of the radix cache, or an invariant that does not hold."""

@final
class CacheNode:
    """A cached prefix; stale once it was evicted."""

@final
class CacheNamespace:
    """What must agree besides the tokens; the empty string differs from `None`."""

    def __new__(
        cls,
        *,
        model_generation: int = 0,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> CacheNamespace: ...

@final
class CacheTails:
    """How many pages of each component cover the end of a prompt: made once, used by every call."""

    def __new__(cls, counts: dict[str, int]) -> CacheTails: ...

@final
class RadixCache:
    """The radix tree with its page pools.

    Tokens and pages are contiguous uint32 arrays, which must not be written during a call.
    """

    def __new__(
        cls,
        *,
        page_size: int,
        num_pages: int,
        enabled: bool = True,
        policy: str = "lru",
        components: dict[str, tuple[int, int, int]] | None = None,
        event_batches: int | None = None,
    ) -> RadixCache:
        """An empty cache.

        Args:
            page_size: Tokens a page holds, a power of two.
            num_pages: Usable FULL pages.
            enabled: Whether anything is cached.
            policy: lru, lfu, slru, fifo, priority or cost.
            components: `(window, page_tokens, num_pages)` of window, draft and state, as far as the
                tree holds them; a window of 0 asks for data on the whole path.
            event_batches: KV event batches kept for replay; None records no events.

        Raises:
            ValueError: A name is unknown.
            CacheError: A value cannot work.
        """

    def match_prefix(
        self, namespace: CacheNamespace, tokens: NDArray[np.uint32]
    ) -> tuple[int, CacheNode, NDArray[np.uint32]]:
        """Returns `(cached_len, node, pages)` of the longest cached prefix."""

    def match_dry_run(self, namespace: CacheNamespace, tokens: NDArray[np.uint32]) -> int:
        """Returns the `cached_len` of a match without marking anything as used."""

    def insert(
        self,
        namespace: CacheNamespace,
        tokens: NDArray[np.uint32],
        pages: NDArray[np.uint32],
        *,
        start: CacheNode | None = None,
        priority: int | None = None,
    ) -> tuple[CacheNode, int, list[tuple[int, int, int]]]:
        """Returns `(node, reused_len, replaced)`; `replaced` has `(page_index, own, tree)` each."""

    def insert_tails(
        self,
        namespace: CacheNamespace,
        tokens: NDArray[np.uint32],
        pages: NDArray[np.uint32],
        tails: dict[str, NDArray[np.uint32]],
        *,
        start: CacheNode | None = None,
        priority: int | None = None,
    ) -> tuple[
        CacheNode,
        int,
        list[tuple[int, int, int]],
        list[tuple[str, int, list[tuple[int, int, int]]]],
    ]:
        """Like `insert` with data of other components, by name, for the end of the key.

        Also returns `(component, num_kept, replaced)` where some pages stay the caller's.
        """

    def insert_row(
        self,
        namespace: CacheNamespace,
        tokens: NDArray[np.uint32],
        row: NDArray[np.uint32],
        tails: CacheTails,
        *,
        start: CacheNode | None = None,
        priority: int | None = None,
    ) -> tuple[
        CacheNode,
        int,
        list[tuple[int, int, int]],
        list[tuple[str, int, list[tuple[int, int, int]]]],
    ]:
        """Like `insert_tails` with all pages in one array: the FULL ones, then those of `tails`."""

    def tail_pages(self, node: CacheNode, component: str) -> NDArray[np.uint32]:
        """Returns the pages that a component has for the end of a prefix."""

    def lock(self, node: CacheNode) -> int:
        """Locks a prefix; returns the number of the receipt."""

    def release_window(self, receipt: int) -> None:
        """Gives up a receipt's hold on components besides FULL."""

    def unlock(self, receipt: int) -> None:
        """Gives a receipt back, once."""

    def allocate(self, count: int) -> NDArray[np.uint32] | None:
        """Returns `count` free pages, or `None` if there are fewer."""

    def free(self, pages: NDArray[np.uint32]) -> None:
        """Takes held pages back."""

    def evict(self, count: int) -> int:
        """Evicts at least `count` pages if it can; returns how many."""

    def allocate_component(self, component: str, count: int) -> NDArray[np.uint32] | None:
        """Like `allocate`, `free` and `evict` for a component by name."""

    def allocate_row(self, count: int, tails: CacheTails) -> NDArray[np.uint32] | None:
        """Like `allocate` with the pages of `tails` behind the FULL ones."""

    def free_component(self, component: str, pages: NDArray[np.uint32]) -> None:
        """Takes held pages of a component back."""

    def evict_component(self, component: str, count: int) -> int:
        """Evicts at least `count` pages of a component if it can; returns how many."""

    def retire_generations(self, generation: int) -> None:
        """Makes what was cached for earlier model generations go before all else."""

    def match_batch(
        self, namespace: CacheNamespace, prompts: list[NDArray[np.uint32]]
    ) -> tuple[NDArray[np.uint32], list[CacheNode], NDArray[np.uint32]]:
        """`match_prefix` of each prompt, in order.

        Returns the cached lengths, the nodes, and the pages of all one after the other.
        """

    def match_dry_run_batch(
        self, namespace: CacheNamespace, prompts: list[NDArray[np.uint32]]
    ) -> NDArray[np.uint32]:
        """`match_dry_run` of each prompt."""

    def insert_batch(
        self,
        namespace: CacheNamespace,
        prompts: list[NDArray[np.uint32]],
        pages: list[NDArray[np.uint32]],
        *,
        starts: list[CacheNode] | None = None,
    ) -> list[tuple[CacheNode, int, list[tuple[int, int, int]]]]:
        """`insert` of each prompt, in order. An error leaves those before it inserted."""

    def lock_batch(self, nodes: list[CacheNode]) -> list[int]:
        """Locks prefixes; returns the numbers of the receipts. An error locks none."""

    def unlock_batch(self, receipts: list[int]) -> None:
        """Gives receipts back, in order."""

    def take_events(self, timestamp_us: int) -> tuple[int, int, list[dict[str, Any]]] | None:
        """Closes the batch of events since the last call; `None` if there were none."""

    def replay_events(self, sequence: int) -> list[tuple[int, int, list[dict[str, Any]]]] | None:
        """The kept batches from a number on, or `None` if one of them is not kept any more."""

    def snapshot_events(self) -> list[dict[str, Any]]:
        """Events that lead from nothing to what is cached now."""

    def stats(self) -> dict[str, Any]:
        """Counts by component and owner, receipts, and the number of the next event batch."""

    def flush(self) -> int:
        """Empties the tree; returns the pages freed. Raises while anything is locked."""

    def check_invariants(self) -> None:
        """Recounts everything; raises if something differs."""

    def page_hashes(self, namespace: CacheNamespace, tokens: NDArray[np.uint32]) -> list[bytes]:
        """Returns the chained SHA-256 of each whole page."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_evictable(self) -> int: ...
    @property
    def num_locked(self) -> int: ...
    @property
    def num_held(self) -> int: ...
