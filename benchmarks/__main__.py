"""Entry of `python -m benchmarks` and of `make bench`."""

import sys

from benchmarks.run import main

if __name__ == "__main__":
    sys.exit(main())
