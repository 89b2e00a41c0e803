"""`python -m dsserve.launch_server`: an alias of `dsserve launch`, as users of SGLang know it."""

from __future__ import annotations

import sys

from dsserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
