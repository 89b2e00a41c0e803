"""Encodes and decodes weights in the checkpoint's number formats (weights.md section 2).

For writing checkpoints and for tests; the engine's operators have their own decoders.
"""

from __future__ import annotations

import torch

from dsserve.errors import ConfigError

#: Largest finite magnitudes of E4M3FN and E2M1.
E4M3_MAX = 448.0
E2M1_MAX = 6.0
#: Magnitude of each of the eight E2M1 codes.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Exponent bias of UE8M0.
UE8M0_BIAS = 127


def encode_fp8(
    values: torch.Tensor, *, block_rows: int, block_columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to E4M3FN with one power-of-two scale per block.

    Args:
        values: [rows, columns] float32.
        block_rows: Rows that share a scale (32, or 1 for Engram tables).
        block_columns: Columns that share a scale.

    Returns:
        ([rows, columns] float8_e4m3fn, [ceil(rows / block_rows), ceil(columns / block_columns)] uint8).
    """
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % block_columns, 0, -rows % block_rows))
    blocks = padded.view(
        padded.shape[0] // block_rows, block_rows, padded.shape[1] // block_columns, block_columns
    )
    scale_codes = _scale_codes(blocks.abs().amax(dim=(1, 3)), E4M3_MAX)
    scaled = blocks / decode_scale(scale_codes)[:, None, :, None]
    codes = scaled.reshape(padded.shape)[:rows, :columns].clamp(-E4M3_MAX, E4M3_MAX)
    return codes.to(torch.float8_e4m3fn).contiguous(), scale_codes


def decode_fp8(codes: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
    """Return [rows, columns] float32; the block size follows from the shapes."""
    rows, columns = codes.shape
    block_rows = 1 if scale_codes.shape[0] == rows else 32
    scales = decode_scale(scale_codes).repeat_interleave(block_rows, dim=0)[:rows]
    return codes.float() * scales.repeat_interleave(32, dim=1)[:, :columns]


def encode_fp4(values: torch.Tensor, *, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to packed E2M1 with one power-of-two scale per row and `block` columns.

    Args:
        values: [rows, columns] float32; columns a multiple of `block`.
        block: Columns that share a scale.

    Returns:
        ([rows, columns / 2] uint8, even columns in the low nibble; [rows, columns / block] uint8).

    Raises:
        ConfigError: If the columns do not divide into blocks.
    """
    rows, columns = values.shape
    if columns % block:
        raise ConfigError(f"an FP4 matrix needs a multiple of {block} columns, not {columns}")
    blocks = values.view(rows, columns // block, block)
    scale_codes = _scale_codes(blocks.abs().amax(dim=2), E2M1_MAX)
    scaled = (blocks / decode_scale(scale_codes)[:, :, None]).view(rows, columns)
    codes = _round_e2m1(scaled)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scale_codes


def decode_fp4(packed: torch.Tensor, scale_codes: torch.Tensor) -> torch.Tensor:
    """Return [rows, columns] float32 of packed E2M1 codes."""
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    magnitudes = torch.tensor(E2M1_VALUES)[(codes & 7).long()]
    values = torch.where(codes >= 8, -magnitudes, magnitudes)
    block = values.shape[1] // scale_codes.shape[1]
    return values * decode_scale(scale_codes).repeat_interleave(block, dim=1)


def decode_scale(scale_codes: torch.Tensor) -> torch.Tensor:
    """Return float32 powers of two of UE8M0 bytes."""
    return torch.exp2(scale_codes.float() - UE8M0_BIAS)


def _scale_codes(magnitude: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the smallest UE8M0 scale under which `magnitude` fits into `largest`; 1 for an empty block."""
    mantissa, exponent = torch.frexp(magnitude.double() / largest)  # mantissa in [0.5, 1), or 0
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return (exponent + UE8M0_BIAS).clamp(0, 254).to(torch.uint8)


def _round_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """Return uint8 codes of the nearest E2M1 value; a tie goes to the even code."""
    magnitude = scaled.abs().clamp(max=E2M1_MAX)
    values = torch.tensor(E2M1_VALUES)
    middles = (values[1:] + values[:-1]) / 2
    below = torch.bucketize(magnitude, middles)  # a middle itself goes down
    above = torch.bucketize(magnitude, middles, right=True)  # a middle itself goes up
    codes = torch.where(below % 2 == 0, below, above).to(torch.uint8)
    return codes | (torch.signbit(scaled).to(torch.uint8) << 3)
