"""Bounded replay: what its floors and whole extends mean row by row."""
