"""Synthetic data: seeded task generators over an open vocabulary, with a held-out split by construction."""
