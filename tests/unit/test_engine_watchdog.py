import logging

import pytest

from dsserve.engine.loop import Progress
from dsserve.engine.watchdog import NO_PROGRESS_LIMIT_S, Watchdog
from dsserve.protocol.engine import ExitCode


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def make(clock, *, parent=7, tmp_path="", codes=None):
    return Watchdog(
        timeout_s=10.0,
        parent_pid=7,
        ipc_dir=str(tmp_path),
        clock=clock,
        get_parent=lambda: parent,
        end_process=(codes if codes is not None else []).append,
    )


def test_nothing_is_wrong_while_the_loop_passes(clock):
    watchdog, progress = make(clock), Progress()
    watchdog.watch(progress)
    for _ in range(100):
        clock.now_s += 5
        progress.last_pass_s = clock.now_s
        assert watchdog.check() is None


def test_step_within_the_timeout_is_alive_though_the_loop_waits(clock):
    watchdog, progress = make(clock), Progress()
    watchdog.watch(progress)
    progress.step_since_s = clock.now_s
    clock.now_s += 9.9
    assert watchdog.check() is None


def test_step_that_takes_too_long_ends_the_process(clock):
    watchdog, progress = make(clock), Progress()
    watchdog.watch(progress)
    progress.step_since_s = clock.now_s
    clock.now_s += 10.1
    progress.last_pass_s = clock.now_s
    assert watchdog.check() is ExitCode.WATCHDOG


def test_stuck_loop_ends_the_process(clock):
    watchdog = make(clock)
    watchdog.watch(Progress())
    clock.now_s += 10.1
    assert watchdog.check() is ExitCode.WATCHDOG


def test_warning_comes_once_at_half_of_the_timeout(clock, caplog):
    watchdog, progress = make(clock), Progress()
    watchdog.watch(progress)
    progress.step_since_s = clock.now_s
    clock.now_s += 6
    progress.last_pass_s = clock.now_s
    with caplog.at_level(logging.WARNING):
        watchdog.check()
        watchdog.check()
    assert caplog.text.count("a step has been running") == 1


def test_requests_that_wait_without_progress_end_the_process(clock):
    watchdog, progress = make(clock), Progress()
    watchdog.watch(progress)
    progress.stalled_since_s = clock.now_s
    clock.now_s += NO_PROGRESS_LIMIT_S + 1
    progress.last_pass_s = clock.now_s
    assert watchdog.check() is ExitCode.WATCHDOG


def test_loading_has_no_timeout(clock):
    watchdog = make(clock)
    clock.now_s += 1e6
    assert watchdog.check() is None


def test_loss_of_the_parent_ends_the_process_and_removes_its_directory(clock, tmp_path):
    (tmp_path / "ipc").mkdir()
    (tmp_path / "ipc" / "to_engine.sock").touch()
    codes = []
    watchdog = make(clock, parent=1, tmp_path=tmp_path / "ipc", codes=codes)
    assert watchdog.check() is ExitCode.ORPHANED
    watchdog._end(ExitCode.ORPHANED)
    assert codes == [ExitCode.ORPHANED]
    assert not (tmp_path / "ipc").exists()


def test_dump_holds_the_last_state(clock, caplog, capfd):
    codes = []
    watchdog, progress = make(clock, codes=codes), Progress()
    progress.snapshot = {"steps_in_flight": [17]}
    watchdog.watch(progress)
    with caplog.at_level(logging.CRITICAL):
        watchdog._end(ExitCode.WATCHDOG)
    assert '"steps_in_flight": [17]' in caplog.text
    assert codes == [ExitCode.WATCHDOG]
