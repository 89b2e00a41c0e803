"""CPU bodies of cache row reads and writes."""
