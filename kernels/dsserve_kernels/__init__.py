"""Operators of the dsserve engine: a registry, and a torch reference for each."""
