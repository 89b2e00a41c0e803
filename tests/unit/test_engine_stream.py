import threading

import pytest

from dsserve.worker.stream import Stream, StreamClosed


@pytest.fixture
def stream():
    stream = Stream("test stream")
    yield stream
    stream.close()


def test_work_runs_in_order_of_submission(stream):
    seen = []
    for i in range(100):
        stream.submit(lambda i=i: seen.append(i))
    stream.synchronize()
    assert seen == list(range(100))


def test_submit_returns_before_the_work_ran(stream):
    may_run = threading.Event()
    completion = stream.submit(lambda: may_run.wait() and "result")
    assert not completion.done()
    assert not completion.wait_done(0)
    may_run.set()
    assert completion.wait() == "result"
    assert completion.done()
    assert completion.wait_done(0)


def test_exception_of_the_work_is_raised_by_wait(stream):
    completion = stream.submit(lambda: 1 // 0)
    assert completion.wait_done(10)
    with pytest.raises(ZeroDivisionError):
        completion.wait()


def test_after_an_exception_nothing_runs_and_everything_raises_it(stream):
    seen = []
    stream.submit(lambda: 1 // 0)
    later = stream.submit(lambda: seen.append("ran"))
    with pytest.raises(ZeroDivisionError):
        later.wait()
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()
    assert seen == []


def test_close_lets_queued_work_end_and_refuses_more(stream):
    seen = []
    for i in range(10):
        stream.submit(lambda i=i: seen.append(i))
    stream.close()
    stream.close()
    assert seen == list(range(10))
    with pytest.raises(StreamClosed):
        stream.submit(lambda: None)
