"""Operators that fuse several steps of a layer: the plain chain of each, and CPU bodies of few rows."""
