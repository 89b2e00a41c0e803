"""CPU bodies of the Engram."""
