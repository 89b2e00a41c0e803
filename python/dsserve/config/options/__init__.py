"""The launch flags, one dataclass per group of the flag table."""
