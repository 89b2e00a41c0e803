"""Serving engine for DeepSeek-V4.1 and V4 models."""
