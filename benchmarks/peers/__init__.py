"""The core's workloads side by side with other engines' in one process; `make bench-peers`."""
