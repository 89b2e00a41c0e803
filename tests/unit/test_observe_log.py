import io
import json
import logging

import pytest

from dsserve.observe.log import StepLog, setup_logging


@pytest.fixture
def stream():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_line_names_level_process_and_logger(stream):
    setup_logging("info", process="engine", stream=stream)
    logging.getLogger("dsserve.x").info("loaded %d", 3)
    logging.getLogger("dsserve.x").debug("not shown")
    assert stream.getvalue().endswith(" INFO    engine dsserve.x: loaded 3\n")
    assert stream.getvalue().count("\n") == 1


def test_json_line_carries_fields_and_traceback(stream):
    setup_logging("debug", use_json=True, process="engine", stream=stream)
    log = StepLog(decode_interval=1, clock=iter([0.0, 0.0, 2.0]).__next__)
    log.decode(5, lambda: {"num_running_reqs": 2})
    try:
        int("x")
    except ValueError:
        logging.getLogger("dsserve.x").exception("failed")
    step, error = map(json.loads, stream.getvalue().splitlines())
    assert (step["tokens"], step["tokens_per_s"], step["num_running_reqs"]) == (5, 2.5, 2)
    assert (step["level"], step["process"]) == ("info", "engine")
    assert "ValueError: invalid literal" in error["traceback"]


def test_second_setup_replaces_the_first(stream):
    other = io.StringIO()
    setup_logging("info", stream=other)
    setup_logging("info", stream=stream)
    logging.getLogger("dsserve.x").info("once")
    assert other.getvalue() == ""
    assert stream.getvalue().count("once") == 1


def test_decode_steps_write_one_line_per_interval_and_ask_for_levels_only_then(caplog):
    asked = []
    ticks = iter(range(1000))
    log = StepLog(decode_interval=40, clock=lambda: float(next(ticks)))
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            log.decode(3, lambda: asked.append(1) or {"num_running_reqs": 3})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(asked) == 2
    assert all("steps=40 tokens=120 " in line for line in lines)


def test_every_prefill_step_writes_a_line(caplog):
    log = StepLog(decode_interval=40)
    with caplog.at_level(logging.INFO):
        log.prefill({"step": 1, "new_tokens": 7}, {"num_queue_reqs": 2})
    assert caplog.messages == ["prefill step: step=1 new_tokens=7 num_queue_reqs=2"]
