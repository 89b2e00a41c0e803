"""CPU bodies of the matrix products."""
