"""Health, readiness, metrics, information about the server, and what an operator may tell it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dsserve.config.version import package_version
from dsserve.entrypoints.body import read_object, request_schema, validate
from dsserve.entrypoints.errors import OrjsonResponse, error_response
from dsserve.entrypoints.middleware import is_admin, is_loopback
from dsserve.entrypoints.state import ServerState, state_of
from dsserve.errors import (
    Conflict,
    DsserveError,
    Forbidden,
    InvalidRequest,
    NotFound,
    NotReady,
    Unsupported,
)
from dsserve.observe.metrics import CONTENT_TYPE
from dsserve.protocol.engine import EngineRequest, FinishCode, SamplingParams, pack_u32

router = APIRouter()

FRESH_TOKEN_S = 20.0
PROBE_TIMEOUT_S = 20.0
STATE_TIMEOUT_S = 30.0


class AbortBody(BaseModel):
    """`POST /abort_request`."""

    model_config = ConfigDict(strict=True, extra="allow")

    rid: str | None = Field(
        None,
        min_length=1,
        description="An answer's id; of one that the client chose, also its beginning.",
    )
    abort_all: bool | None = False


@router.get("/health")
async def health(request: Request) -> Response:
    """Tell whether this process and the engine live; no work is done."""
    state = state_of(request)
    client = state.client
    if client.failure is not None:
        raise client.failure
    if client.is_ready and not client.is_alive:
        raise NotReady(
            f"the engine has not shown itself for {client.heartbeat_age_s:.0f} s",
            code="engine_unresponsive",
        )
    return OrjsonResponse({"status": _status(state)})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Tell whether requests are taken."""
    state = state_of(request)
    state.check_takes_requests()
    return OrjsonResponse({"status": "ready"})


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """Tell whether tokens come out: one came lately, a long step runs, or a probe produces one."""
    state = state_of(request)
    if state.client.failure is not None:
        raise state.client.failure
    if not state.client.is_ready:
        raise NotReady("the server is still loading the model", retry_after_s=5)
    if time.monotonic() - state.last_token_s < FRESH_TOKEN_S:
        return OrjsonResponse({"status": "ok", "by": "recent token"})
    if _has_step_in_progress(state):
        return OrjsonResponse({"status": "ok", "by": "step in progress"})
    try:
        await run_probe(state, timeout_s=PROBE_TIMEOUT_S)
    except TimeoutError:
        if _has_step_in_progress(state):
            return OrjsonResponse({"status": "ok", "by": "step in progress"})
        raise NotReady(
            f"no token came within {PROBE_TIMEOUT_S:g} s", code="engine_unresponsive"
        ) from None
    return OrjsonResponse({"status": "ok", "by": "probe"})


async def run_probe(state: ServerState, *, timeout_s: float) -> None:
    """Generate one token from one token, apart from every cache.

    Raises:
        TimeoutError: If none came in time.
        DsserveError: If the engine refused or failed.
    """
    request = EngineRequest(
        request_id=state.client.next_request_id(),
        token_ids=pack_u32([0]),
        max_new_tokens=1,
        sampling=SamplingParams(temperature=0.0),
        extra_key="dsserve-probe",
        arrival_s=time.monotonic(),
    )
    async with asyncio.timeout(timeout_s):
        async with state.client.submit(request) as stream:
            async for delta in stream:
                if delta.finish_code is not FinishCode.NONE:
                    state.last_token_s = time.monotonic()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all series in Prometheus' text format."""
    state = state_of(request)
    if state.config.disable_metrics:
        raise NotFound("metrics are switched off (--disable-metrics)")
    info = state.client.info if state.client.is_ready else {}
    state.metrics.update_engine(
        state.client.stats, max_tokens=int(info.get("max_total_num_tokens", 0))
    )
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)


@router.get("/get_server_info")
@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """Return the resolved configuration, the pools after an invariant check, and versions."""
    state = state_of(request)
    info: dict[str, Any] = {
        "status": _status(state),
        "version": package_version(),
        "uptime_s": round(time.time() - state.started_s, 3),
        "model": state.model.names[0],
        "config": state.config.to_public_dict(),
        "num_live_requests": len(state.live),
        "engine": state.client.info if state.client.is_ready else None,
        "state": None,
        "state_error": None,
    }
    if state.client.is_ready:
        try:
            info["state"] = await state.client.query_state(timeout_s=STATE_TIMEOUT_S)
        except DsserveError as error:
            info["state_error"] = error.message
    return OrjsonResponse(info)


@router.get("/get_model_info")
@router.get("/model_info")
async def model_info(request: Request) -> Response:
    """Return what is served, in the words of SGLang."""
    state = state_of(request)
    return OrjsonResponse(
        {
            "model_path": state.model.root,
            "tokenizer_path": state.config.tokenizer_path or state.model.root,
            "served_model_name": state.model.names[0],
            "is_generation": True,
            "max_model_len": state.model.context_length,
            "vocab_size": state.model.vocab_size,
            "preferred_sampling_params": state.model.defaults or None,
            "system_fingerprint": state.model.fingerprint,
        }
    )


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    """Return the load of each attention-DP group."""
    state = state_of(request)
    stats = state.client.stats
    load = {
        "dp_rank": 0,
        "num_running_reqs": int(stats.get("num_running", 0)),
        "num_waiting_reqs": int(stats.get("num_waiting", 0)),
        "token_usage": stats.get("token_usage", 0.0),
        "num_open_requests": state.client.num_open_requests,
    }
    return OrjsonResponse({"timestamp": time.time(), "dp_rank_count": 1, "loads": [load]})


@router.post("/flush_cache")
async def flush_cache(request: Request, tier: str | None = None) -> Response:
    """Empty the prefix cache, if no request uses it."""
    state = state_of(request)
    for name in (tier or "device").split(","):
        if name not in ("device", "host", "storage"):
            raise InvalidRequest(f"'tier' {name!r} is none of device, host, storage", param="tier")
        if name != "device":
            raise Unsupported(f"this server has no tier {name!r}", param="tier")
    if not state.client.is_ready:
        raise NotReady("the server is still loading the model", retry_after_s=5)
    is_flushed, holders = await state.client.flush()
    if not is_flushed:
        error = Conflict(
            f"the cache is in use by {len(holders)} requests; try again when they have ended",
            code="cache_in_use",
        )
        response = error_response(error)
        response.body = OrjsonResponse(error.body() | {"holders": holders}).body
        response.headers["content-length"] = str(len(response.body))
        return response
    return OrjsonResponse({"success": True, "message": "the prefix cache is empty"})


@router.post("/abort_request", openapi_extra=request_schema(AbortBody))
async def abort_request(request: Request) -> Response:
    """End requests early: those whose id starts with `rid`, or all."""
    state = state_of(request)
    body = validate(AbortBody, await read_object(request))
    if body.abort_all:
        _check_may_abort_all(request, state)
        count = len(state.live)
        state.client.abort_all()
        return OrjsonResponse({"success": True, "num_aborted": count})
    if body.rid is None:
        raise InvalidRequest("give 'rid' or 'abort_all': true", param="rid")
    request_ids = state.live.find(body.rid)
    for request_id in request_ids:
        state.client.abort(request_id)
    return OrjsonResponse({"success": True, "num_aborted": len(request_ids)})


def _check_may_abort_all(request: Request, state: ServerState) -> None:
    config = state.config
    if not is_admin(request.scope, config.admin_api_key):
        raise Forbidden("'abort_all' needs the admin key (--admin-api-key)", param="abort_all")
    if config.admin_api_key is None and not config.api_key and not is_loopback(request.scope):
        raise Forbidden(
            "without --admin-api-key or --api-key 'abort_all' is for the local machine only",
            param="abort_all",
        )


def _has_step_in_progress(state: ServerState) -> bool:
    beat = state.client.last_heartbeat
    return (
        state.client.is_alive
        and beat is not None
        and 0 < beat.step_age_s < state.config.watchdog_timeout
    )


def _status(state: ServerState) -> str:
    if state.is_draining:
        return "draining"
    return "ready" if state.is_ready else "loading"
