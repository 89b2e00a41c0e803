"""CPU bodies of the sparse attention."""
