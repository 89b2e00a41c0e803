"""mHC bodies other than the reference."""
