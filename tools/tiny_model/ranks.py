"""Several GPUs of one host: every process trains on its own data, and the masters are averaged every few steps.

Started by `torchrun --nproc-per-node N -m tools.tiny_model.train ...`; without it there is one rank and nothing to do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

#: Steps between two averages. The optimiser's moments stay each rank's own.
AVERAGE_EVERY = 4
#: Distance between the data seeds of two ranks.
SEED_STRIDE = 1_000_003


class Ranks:
    """This process among those of the run.

    Attributes:
        index: Rank of this process; rank 0 keeps the clock, the log and the files.
        count: Processes of the run.
    """

    def __init__(self) -> None:
        self.index = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        if self.count > 1:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")

    @property
    def is_first(self) -> bool:
        """Whether this process writes log and files."""
        return self.index == 0

    def is_due(self, step: int) -> bool:
        """Whether the ranks meet after this step."""
        return self.count > 1 and step % AVERAGE_EVERY == 0

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the mean of all."""
        for tensor in tensors:
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)

    def agree(self, *, done: bool, device: torch.device) -> bool:
        """What rank 0 says, so that all ranks end after the same step."""
        if self.count == 1:
            return done
        flag = torch.tensor([done], dtype=torch.int32, device=device)
        dist.broadcast(flag, 0)
        return bool(flag.item())

    def meet(self) -> None:
        """Wait for the slowest rank; compilation takes each its own time."""
        if self.count > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        if self.count > 1:
            dist.destroy_process_group()
