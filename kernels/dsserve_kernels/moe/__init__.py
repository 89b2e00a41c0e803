"""CPU bodies of router and experts."""
