"""The CUDA worker on a stand-in device: the tokens of the CPU worker, and never a wait while a step is launched."""

from __future__ import annotations

from device_stand_in import StandInDevice
from worker_drive import Drive, asks, cpu_worker, device_worker, load


def test_the_device_worker_draws_the_tokens_of_the_cpu_worker() -> None:
    models = {platform: load(platform) for platform in ("cpu", "cuda")}
    expected = Drive(lambda capacity: cpu_worker(models["cpu"], capacity)).run(asks())
    device = StandInDevice()
    ours = Drive(lambda capacity: device_worker(models["cuda"], device, capacity)).run(asks())
    assert ours == expected
    assert [len(ids) for ids in expected] == [3, 5, 5, 5, 5, 4]
    assert expected[5][-1] == 1, "the end token comes as soon as it may"
