"""Whatever deepseek-recipe raises on a client's input becomes a 400."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepseek_recipe import ConversionError

from dsserve.errors import InvalidRequest, RequestError

logger = logging.getLogger(__name__)

_SERDE_PREFIX = "invalid request body: "
_BLAMED_FIELD = re.compile(r"^(?:Invalid|invalid) '?([a-z_]+)(?:\[\d+\])?'?(?: value|:)")


@contextmanager
def recipe_errors(body: Mapping[str, Any]) -> Iterator[None]:
    """Turn every exception of the recipe inside the block into `InvalidRequest`.

    Its conversion errors and those of its JSON reader keep their message; our own errors pass; any
    other gets a generic message and is logged with the hash of `body`, so that it can be found without logging prompts.
    """
    try:
        yield
    except ConversionError as error:
        raise _conversion_error(error) from error
    except RequestError:
        raise
    except RecursionError as error:
        raise InvalidRequest(
            "the body is nested too deeply: more than 128 levels", code="nested_too_deeply"
        ) from error
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "the body holds a lone surrogate, which is no valid text", code="invalid_unicode"
        ) from error
    except BaseException as error:
        # A panic of the package is no `Exception`; anything else of that kind passes.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, ValueError) and str(error).startswith(_SERDE_PREFIX):
            raise InvalidRequest(str(error)) from error
        # The message may quote the prompt, so it is for debugging only.
        name = body_hash(body)
        logger.warning("deepseek-recipe failed on body %s with %s", name, type(error).__name__)
        logger.debug("deepseek-recipe on body %s: %s", name, error)
        raise InvalidRequest("the request cannot be converted to a prompt") from error


def body_hash(body: Mapping[str, Any]) -> str:
    """Return a short hash that names a body in logs without showing it."""
    text = json.dumps(body, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _conversion_error(error: ConversionError) -> InvalidRequest:
    try:
        details = json.loads(error.body)["error"]
        message, param = str(details["message"]), details.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param = str(error), None
    if param is None and (blamed := _BLAMED_FIELD.match(message)):
        param = blamed[1]
    return InvalidRequest(message, param=param)
