"""Puts the small constant tables of the operators on a device, before a step would have to."""

from __future__ import annotations

import torch

from dsserve_kernels.reference.quant import quantize_fp4_index, unpack_e2m1


def place_tables(device: torch.device) -> None:
    """Make every table that is copied to a device at its first use; later uses copy nothing."""
    quantize_fp4_index(torch.zeros(1, 32, device=device))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        unpack_e2m1(torch.zeros(1, dtype=torch.uint8, device=device), dtype)
