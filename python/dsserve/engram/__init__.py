"""Engram tables: hashing, placement, staging."""
