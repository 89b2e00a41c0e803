"""Torch bodies for a device whose host must not wait: no sizes taken from data, no copy from host memory.

They stand in for the reference where that looks at numbers on the host (boolean indices, loops over the experts that
were chosen, a branch on the temperatures), or where CUDA rounds differently from the CPU inside one operation. Their
results are those of the reference; the same code runs on CPU tensors, where the tests hold it against the reference.
"""
