"""Plain torch bodies of every operator: they run on the CPU and are the oracle of all tests."""

from dsserve_kernels.reference import (
    attention,
    compressor,
    engram,
    gemm,
    indexer,
    kvcache,
    mhc,
    moe,
    norm,
    quant,
    sampling,
    speculative,
    wide,
)

__all__ = [
    "attention",
    "compressor",
    "engram",
    "gemm",
    "indexer",
    "kvcache",
    "mhc",
    "moe",
    "norm",
    "quant",
    "sampling",
    "speculative",
    "wide",
]
