"""DeepSeek-V4.1 and V4."""
