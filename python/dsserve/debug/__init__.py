"""Parity and checkpoint tools."""
