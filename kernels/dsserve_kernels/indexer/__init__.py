"""CPU bodies of the index scores and the selection."""
