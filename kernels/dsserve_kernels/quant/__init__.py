"""CPU bodies of the quantisers."""
