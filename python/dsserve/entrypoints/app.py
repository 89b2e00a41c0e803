"""Builds the FastAPI application of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from dsserve.entrypoints import admin, tokenize
from dsserve.entrypoints.errors import LastResortMiddleware, install_error_handlers
from dsserve.entrypoints.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    HttpMetricsMiddleware,
    RequestIdMiddleware,
)
from dsserve.entrypoints.openai import chat, completions, models

if TYPE_CHECKING:
    from dsserve.entrypoints.state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """Return the application; every endpoint finds `state` in `app.state.server`."""
    app = FastAPI(title="dsserve", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.server = state
    install_error_handlers(app)
    for router in (
        chat.router,
        completions.router,
        models.router,
        tokenize.router,
        admin.router,
    ):
        app.include_router(router)
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, max_bytes=state.config.max_payload_size)
    app.add_middleware(
        ApiKeyMiddleware, api_keys=state.config.api_key, admin_key=state.config.admin_api_key
    )
    app.add_middleware(LastResortMiddleware)
    app.add_middleware(HttpMetricsMiddleware, metrics=state.metrics)
    app.add_middleware(RequestIdMiddleware)
    return app
