"""Engram tables: the same rows from every placement, honest counts of the cache, memory that is asked for first."""

from __future__ import annotations

import itertools
import re
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dsserve.config.model import load_model_config
from dsserve.debug.plans import merge_plans
from dsserve.engram import host_table
from dsserve.engram.cache import RowCache
from dsserve.engram.hashing import build_engram_constants, load_token_map, sequence_rows
from dsserve.engram.placement import EngramOptions, check_memory, memory_needed, open_tables
from dsserve.engram.shared import SharedFolder, folder_name, sweep
from dsserve.engram.staging import planned_rows
from dsserve.engram.table import EngramStats, TableShape, table_shapes
from dsserve.errors import ConfigError
from dsserve.models.deepseek_v4.engram_source import RandomRows, row_source, table_names
from dsserve.models.deepseek_v4.weights import byte_view, random_weights
from dsserve.observe.metrics import Metrics
from dsserve.worker.runner import load_model
from golden_runs import model, prompt_ids
from model_runs import Pool, Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dsserve.engram.hashing import EngramConstants
    from dsserve.engram.placement import OpenTables
    from dsserve.engram.table import Codes, RowBytes

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "v41-tiny-a"
CONFIG = load_model_config(CHECKPOINT)
SHAPES = table_shapes(CONFIG)
NAMES = itertools.count()


def new_name() -> str:
    return folder_name(f"test{next(NAMES)}")


def checkpoint_tables() -> list[RowBytes]:
    """The tables as a foreign reader sees them."""
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        return [
            tuple(file.get_tensor(name).view(torch.uint8).numpy() for name in names)
            for names in table_names(CONFIG)
        ]


@pytest.fixture(scope="module")
def expected() -> list[RowBytes]:
    return checkpoint_tables()


def opened(root: Path, placement: str, *, cache_rows: int = 0, **options: int) -> OpenTables:
    with row_source(CHECKPOINT, CONFIG, load_format="auto", seed=0, progress=None) as source:
        return open_tables(
            SHAPES,
            EngramOptions(placement=placement, cache_rows=cache_rows, folder=new_name(), **options),
            source,
            root=root,
            timeout_s=5,
        )


def random_rows(seed: int, num_tokens: int, num_columns: int = 24) -> NDArray[np.int64]:
    """[T, tables, columns], some of them often."""
    rng = np.random.default_rng(seed)
    columns = [
        np.minimum(rng.zipf(1.3, (num_tokens, num_columns)), shape.num_rows) - 1 for shape in SHAPES
    ]
    return np.stack(columns, axis=1).astype(np.int64)


@pytest.mark.parametrize("cache_rows", [0, 1, 7, 1000, 100_000])
@pytest.mark.parametrize("placement", ["host", "sharded"])
def test_every_placement_gives_the_rows_of_the_checkpoint(
    tmp_path: Path, expected: list[RowBytes], placement: str, cache_rows: int
) -> None:
    with closing(opened(tmp_path, placement, cache_rows=cache_rows)) as tables:
        for seed in range(4):
            rows = random_rows(seed, num_tokens=40)
            staged = tables.stager.start(rows)
            for table, (codes, scales) in enumerate(expected):
                found = staged.take(table)
                assert np.array_equal(found.codes[found.index], codes[rows[:, table]])
                assert np.array_equal(found.scales[found.index], scales[rows[:, table]])
    assert list(tmp_path.iterdir()) == []


def test_random_tables_are_those_of_the_dummy_weights(tmp_path: Path) -> None:
    weights = random_weights(CONFIG, seed=3)
    options = EngramOptions(placement="host", folder=new_name())
    with closing(open_tables(SHAPES, options, RandomRows(CONFIG, seed=3), root=tmp_path)) as tables:
        for table, names in zip(tables.tables, table_names(CONFIG), strict=True):
            read = table.read(np.arange(table.shape.num_rows))
            for ours, name in zip(read, names, strict=True):
                assert np.array_equal(ours.reshape(-1), byte_view(weights[name]))


class CountedSource:
    """Rows numbered from 0; remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def copy_rows(self, table: int, first: int, codes: Codes, scales: Codes) -> None:
        self.asked.append((table, first, len(codes)))
        numbers = np.arange(first, first + len(codes))
        codes[:] = (numbers % 251)[:, None]
        scales[:] = (numbers % 241)[:, None]


@pytest.mark.parametrize("placement", ["host", "sharded"])
def test_tables_are_loaded_in_bounded_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    monkeypatch.setattr(host_table, "CHUNK_ROWS", 100)
    source = CountedSource()
    shapes = [TableShape(250, 64), TableShape(99, 64)]
    options = EngramOptions(placement=placement, folder=new_name())
    with closing(open_tables(shapes, options, source, root=tmp_path)) as tables:
        codes, scales = tables.tables[0].read(np.array([249, 0, 100]))
    assert source.asked == [(0, 0, 100), (0, 100, 100), (0, 200, 50), (1, 0, 99)]
    assert codes[:, 0].tolist() == [249, 0, 100]
    assert scales[:, 1].tolist() == [8, 0, 100]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_parts_cover_every_row_once_and_pad_the_last(tmp_path: Path, num_ranks: int) -> None:
    """Each rank loads its own range; a part that is not full ends in zero codes of scale 1."""
    shape = TableShape(25, 32)
    part_rows = -(-shape.num_rows // num_ranks)
    with SharedFolder.create(new_name(), root=tmp_path) as folder:
        covered = []
        for rank in range(num_ranks):
            source = CountedSource()
            part = TableShape(part_rows, 32)
            memory = folder.allocate(f"part{rank}", part.num_bytes)
            first = min(rank * part_rows, shape.num_rows)
            num_rows = min(part_rows, shape.num_rows - first)
            host_table.load_rows(source, 0, memory, part, first=first, num_rows=num_rows)
            codes, scales = host_table.row_arrays(memory, part)
            covered += codes[:num_rows, 0].tolist()
            assert not codes[num_rows:].any()
            assert (scales[num_rows:] == 127).all()
            del codes, scales
        assert covered == list(range(shape.num_rows))


class ArrayTable:
    """Rows whose codes are their number; counts the rows read."""

    def __init__(self, shape: TableShape) -> None:
        self.shape = shape
        self.read_rows: list[int] = []

    def read(self, rows: NDArray[np.int64]) -> RowBytes:
        self.read_rows += rows.tolist()
        codes = np.repeat(rows[:, None], self.shape.width, axis=1).astype(np.uint8)
        return codes, codes[:, : self.shape.scale_width].copy()


def test_the_cache_counts_a_hit_only_for_rows_it_held_before() -> None:
    stats = EngramStats("host")
    tables = [ArrayTable(TableShape(50, 32)), ArrayTable(TableShape(50, 32))]
    cache = RowCache([*tables], 10, stats)

    def look_up(table: int, *rows: int) -> tuple[int, int]:
        hits, misses = stats.cache_hits, stats.cache_misses
        codes, _ = cache.read(table, np.array(rows))
        assert codes[:, 0].tolist() == list(rows)
        return stats.cache_hits - hits, stats.cache_misses - misses

    assert look_up(0, 1, 2, 3) == (0, 3)
    assert look_up(0, 2, 3, 4) == (2, 1)
    # 11 and 21 share the place of 1; the first of them takes it, and both are right.
    assert look_up(0, 1, 11, 21) == (1, 2)
    assert look_up(0, 1, 11, 21) == (1, 2)
    # Rows of another table are other rows, though they have the same numbers.
    assert look_up(1, 2) == (0, 1)
    assert look_up(0, 2) == (0, 1)
    assert len(tables[0].read_rows) + len(tables[1].read_rows) == stats.cache_misses


def test_a_step_counts_a_row_once_however_many_tokens_want_it(tmp_path: Path) -> None:
    with closing(opened(tmp_path, "host", cache_rows=1000)) as tables:
        stats = tables.stager.stats
        rows = np.zeros((8, len(SHAPES), 24), dtype=np.int64)
        for _ in range(2):
            staged = tables.stager.start(rows)
            for table in range(len(SHAPES)):
                staged.take(table)
        assert stats.distinct_rows == 2 * len(SHAPES)
        assert (stats.cache_hits, stats.cache_misses) == (len(SHAPES), len(SHAPES))
        assert stats.reads == len(SHAPES)


def test_the_metrics_show_every_total_of_the_heartbeats() -> None:
    metrics = Metrics(model_name="m")
    stats = EngramStats("host", rows=96, cache_hits=5, cache_misses=7, reads=2, read_s=0.5)
    for _ in range(2):
        metrics.update_engine({"engram": asdict(stats)}, max_tokens=1)
        stats.rows += 4
        stats.peer_bytes += 264
    metrics.update_engine({"engram": asdict(stats)}, max_tokens=1)
    found = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith("dsserve_engram"):
            name, value = line.removeprefix("dsserve_").rsplit(" ", 1)
            own = re.findall(r'(?:placement|result)="(\w+)"', name)
            found["".join([name.split("{")[0], *own])] = float(value)
    assert found == {
        "engram_rows_totalhost": 104,
        "engram_cache_rows_totalhit": 5,
        "engram_cache_rows_totalmiss": 7,
        "engram_peer_bytes_total": 528,
        "engram_host_read_seconds_count": 2,
        "engram_host_read_seconds_sum": 0.5,
    }


@pytest.mark.parametrize("placement", ["device", "host", "sharded"])
def test_tables_beyond_the_limit_are_refused_with_the_bytes_they_need(
    tmp_path: Path, placement: str
) -> None:
    options = EngramOptions(placement=placement, num_ranks=3)
    needed = memory_needed(SHAPES, options)
    whole = sum(shape.num_bytes for shape in SHAPES)
    assert needed == 3 * whole if placement == "device" else whole <= needed < 1.1 * whole
    check_memory(
        SHAPES, EngramOptions(placement=placement, num_ranks=3, memory_limit=needed), root=tmp_path
    )
    with pytest.raises(ConfigError, match=rf"need {needed} bytes .* allows {needed - 1};"):
        check_memory(
            SHAPES,
            EngramOptions(placement=placement, num_ranks=3, memory_limit=needed - 1),
            root=tmp_path,
        )


def test_the_caches_count_and_are_no_larger_than_the_tables() -> None:
    plain = EngramOptions(placement="host", num_ranks=3)
    rows = sum(shape.num_rows for shape in SHAPES)
    for asked, kept in ((10, 10), (rows, rows), (10**15, rows)):
        options = EngramOptions(placement="host", num_ranks=3, cache_rows=asked)
        more = memory_needed(SHAPES, options) - memory_needed(SHAPES, plain)
        assert more == 3 * kept * (SHAPES[0].row_bytes + 8)


@pytest.mark.parametrize("placement", ["device", "host", "sharded"])
def test_a_table_larger_than_the_machine_is_refused_without_a_limit(
    tmp_path: Path, placement: str
) -> None:
    source = CountedSource()
    shapes = [TableShape(1 << 40, 256)]
    options = EngramOptions(placement=placement, folder=new_name())
    with pytest.raises(ConfigError, match=f"need {(1 << 40) * 264} bytes"):
        check_memory(shapes, options, root=tmp_path)
    with pytest.raises(ConfigError, match=f"need {(1 << 40) * 264} bytes"):
        open_tables(shapes, options, source, root=tmp_path)
    assert source.asked == []
    assert list(tmp_path.iterdir()) == []


def test_memory_that_runs_out_is_an_error_at_once(tmp_path: Path) -> None:
    """The file system says no before anybody touches a page that is not there."""
    with (
        SharedFolder.create(new_name(), root=tmp_path) as folder,
        pytest.raises(ConfigError, match=f"{1 << 50} bytes are needed"),
    ):
        folder.allocate("table", 1 << 50)


def test_loading_refuses_before_reading_weights(tmp_path: Path) -> None:
    options = EngramOptions(placement="host", folder=new_name(), memory_limit=1000)
    with pytest.raises(ConfigError, match=r"Engram tables need \d+ bytes"):
        load_model(
            CHECKPOINT,
            CONFIG,
            numerics="released",
            context_length=64,
            device=torch.device("cpu"),
            engram=options,
            progress=lambda *_: pytest.fail("something was loaded"),
        )


def test_folders_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    living, dead = new_name(), new_name()
    (tmp_path / dead).mkdir()
    (tmp_path / dead / "table.0").write_bytes(b"rows")
    foreign = tmp_path / "somebody-else"
    foreign.mkdir()
    with SharedFolder.create(living, root=tmp_path) as folder:
        assert not (tmp_path / dead).exists()  # making one sweeps
        (tmp_path / dead).mkdir()
        with SharedFolder.join(living, root=tmp_path, timeout_s=1) as joined:
            assert sweep(root=tmp_path) == [dead]
            assert joined.path == folder.path
        assert folder.path.is_dir()
        with pytest.raises(ConfigError, match="is running"):
            SharedFolder.create(living, root=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["somebody-else"]


@pytest.fixture(scope="module")
def constants() -> EngramConstants:
    return build_engram_constants(
        CONFIG, load_token_map(CHECKPOINT / "tokenizer.json", CONFIG.vocab_size)
    )


def test_rows_of_a_plan_are_those_of_the_whole_sequences(constants: EngramConstants) -> None:
    """Several requests in one step, at the start and in the middle of their prompts."""
    pool = Pool(model(CHECKPOINT, "released"), num_requests=3)
    ids = [prompt_ids(CHECKPOINT, "len100"), prompt_ids(CHECKPOINT, "len64"), [5, 6]]
    requests = [Request(pool, prompt) for prompt in ids]
    whole = [sequence_rows(constants, prompt) for prompt in ids]
    for sizes in ((1, 2, 2), (1, 17), (40, 45)):
        live = requests[: len(sizes)]
        starts = [request.position for request in live]
        plan = merge_plans([request.prefill(n) for request, n in zip(live, sizes, strict=True)])
        rows = planned_rows(constants, plan)
        expected = [
            whole[i][start : start + n]
            for i, (start, n) in enumerate(zip(starts, sizes, strict=True))
        ]
        assert np.array_equal(rows, np.concatenate(expected))
    assert planned_rows(constants, requests[2].decode(-1)) is None
    assert (
        planned_rows(constants, merge_plans([requests[0].prefill(3), requests[2].decode(7)]))
        is None
    )


@pytest.mark.parametrize(
    ("placement", "cache_rows"),
    [
        ("sharded", 50),
        pytest.param("host", 0, marks=pytest.mark.slow),
        pytest.param("host", 50, marks=pytest.mark.slow),
    ],
)
def test_logits_are_the_same_from_every_placement(placement: str, cache_rows: int) -> None:
    """Prefill in chunks, with rows staged from the plan, then decode, with rows staged by the forward."""
    ids = prompt_ids(CHECKPOINT, "len64")
    options = EngramOptions(placement=placement, cache_rows=cache_rows, folder=new_name())
    staged_model = load_model(
        CHECKPOINT,
        CONFIG,
        numerics="released",
        context_length=CONFIG.max_position_embeddings,
        device=torch.device("cpu"),
        engram=options,
    )
    with closing(staged_model):
        logits = []
        for each in (model(CHECKPOINT, "released"), staged_model):
            pool = Pool(each, num_requests=1)
            request = Request(pool, ids)
            plans = [request.prefill(40), request.prefill(40)]
            plans += [request.decode(token) for token in (3, 4, 5)]
            batches = [pool.runner.prepare(plan, all_logits=True) for plan in plans]
            has_staged = [batch.engram is not None for batch in batches]
            logits.append(torch.cat([pool.runner.forward(batch) for batch in batches]))
        assert has_staged == [True, True, False, False, False]
        assert torch.equal(logits[0], logits[1])
        stats = staged_model.engram_stats
        assert stats.placement == placement
        assert stats.rows == (len(ids) + 3) * len(SHAPES) * constants_columns()
        assert 0 < stats.distinct_rows < stats.rows
        if cache_rows:
            assert stats.cache_hits + stats.cache_misses == stats.distinct_rows


def constants_columns() -> int:
    return (CONFIG.engram_max_ngram_size - 1) * CONFIG.engram_n_heads
