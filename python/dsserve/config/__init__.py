"""Frozen configuration, validated once."""
