"""Scores a checkpoint through the HTTP API of a real server; `python -m tools.tiny_model.served`."""
