"""What one flag's declaration does not show: forms of names and paths, and flags that bear on each other.

All of it can be told without a model; what a model adds is in `config/resolve.py`.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsserve.errors import ConfigError

if TYPE_CHECKING:
    from dsserve.config.options.http import HttpOptions
    from dsserve.config.options.loading import LoadingOptions
    from dsserve.config.options.schedule import ScheduleOptions


def check_schedule(options: ScheduleOptions) -> None:
    """Check sizes of pages, pools and chunks.

    Raises:
        ConfigError: Naming the flag, the value and the remedy.
    """
    page = options.page_size
    if page is not None and page & (page - 1):
        below = 1 << (page.bit_length() - 1)
        _fail("--page-size", page, f"must be a power of two; use {below} or {2 * below}")
    fraction = options.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        _fail("--mem-fraction-static", fraction, "must lie between 0 and 1, e.g. 0.8")
    if options.schedule_conservativeness <= 0:
        _fail(
            "--schedule-conservativeness",
            options.schedule_conservativeness,
            "must be positive, e.g. 1.0",
        )
    if options.chunked_prefill_size == 0:
        _fail("--chunked-prefill-size", 0, "use a number of rows, or -1 to leave prompts whole")
    tokens = options.max_total_tokens
    if page is not None and tokens is not None and tokens < page:
        _fail("--max-total-tokens", tokens, f"holds no page of {page} tokens; raise it")


def check_http(options: HttpOptions) -> None:
    """Check the address and the keys.

    Raises:
        ConfigError: Naming the flag, the value (of a key: not) and the remedy.
    """
    host = options.host
    if any(character.isspace() or character in "/@" for character in host):
        _fail("--host", host, "is no host name or address; write e.g. 127.0.0.1")
    if host.replace(".", "").isdigit():
        try:
            ipaddress.ip_address(host)
        except ValueError:
            _fail("--host", host, "is no valid IPv4 address")
    for flag, key in (
        *(("--api-key", key) for key in options.api_key),
        ("--admin-api-key", options.admin_api_key),
    ):
        if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
            raise ConfigError(
                f"{flag}: a key may hold only printable ASCII characters without blanks", param=flag
            )


def check_loading(options: LoadingOptions) -> None:
    """Check the paths and the name of the model.

    Raises:
        ConfigError: Naming the flag, the value and the remedy.
    """
    if options.model_path is not None and not Path(options.model_path).is_dir():
        _fail(
            "--model-path",
            options.model_path,
            "is no folder; give the folder of a checkpoint (nothing is downloaded)",
        )
    if options.tokenizer_path is not None and not Path(options.tokenizer_path).exists():
        _fail("--tokenizer-path", options.tokenizer_path, "does not exist")
    if options.served_model_name is not None and not options.served_model_name.strip():
        _fail("--served-model-name", repr(options.served_model_name), "is empty")


def _fail(flag: str, value: Any, remedy: str) -> None:
    raise ConfigError(f"{flag} {value}: {remedy}", param=flag)
