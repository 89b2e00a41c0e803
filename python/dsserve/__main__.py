"""`python -m dsserve`: the command `dsserve`."""

from __future__ import annotations

import sys

from dsserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
