"""Entry of `python -m benchmarks.peers` and of `make bench-peers`."""

import sys

from benchmarks.peers.suite import main

if __name__ == "__main__":
    sys.exit(main())
