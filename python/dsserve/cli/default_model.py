"""The embedded model, which `dsserve launch` serves without `--model-path`."""

from __future__ import annotations

from pathlib import Path

import dsserve
from dsserve.errors import ConfigError

#: Last part of the path, and so the name in the API.
NAME = "dsserve-tiny"


def embedded_model() -> Path:
    """Return the checkpoint folder of `dsserve-tiny` in the package (docs/tiny-model.md).

    Raises:
        ConfigError: If this installation lacks it.
    """
    folder = Path(dsserve.__file__).parent / "assets" / NAME
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"the embedded model is missing from this installation ({folder}); name a checkpoint by --model-path",
            param="--model-path",
        )
    return folder
