"""KV layouts and pools."""
