"""Bounded replay."""
