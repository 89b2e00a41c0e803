"""The only reader of the environment; everything else gets what it needs from here, as arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Prefix of the variables that stand for flags.
PREFIX = "DSSERVE_"

#: Variables with our prefix that are no flags.
OTHER_VARIABLES = frozenset({"DSSERVE_GOLDEN", "DSSERVE_SYNC_GUARD"})


def environment() -> Mapping[str, str]:
    """Return a copy of the environment of this process."""
    return dict(os.environ)


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine process: numpy's products run on one thread, as torch's do.

    OpenBLAS reads its variable when it is loaded; one that is set stays.
    """
    return {"OPENBLAS_NUM_THREADS": "1", **os.environ}


def no_color() -> bool:
    """Whether the user asked for output without colours (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What the variables of OpenAI clients say."""

    base_url: str | None
    api_key: str | None


def client_settings() -> ClientSettings:
    """Return the server and the key that a client should use, where the variables name them."""
    return ClientSettings(os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY"))


def golden_dir() -> str | None:
    """Return the folder of the golden data, if `DSSERVE_GOLDEN` names one (tests only)."""
    return os.environ.get("DSSERVE_GOLDEN") or None


def has_sync_guard() -> bool:
    """Return whether `DSSERVE_SYNC_GUARD` makes it an error to wait for the device while a step is launched."""
    return os.environ.get("DSSERVE_SYNC_GUARD", "") not in ("", "0")
