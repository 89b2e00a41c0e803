"""`GET /v1/models`: which models this server answers for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from dsserve.entrypoints.errors import OrjsonResponse
from dsserve.entrypoints.state import ServerState, state_of
from dsserve.errors import NotFound

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the served names."""
    state = state_of(request)
    data = [_model_object(state, name) for name in state.model.names]
    return OrjsonResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """Describe one served name."""
    state = state_of(request)
    if name not in state.model.names:
        raise NotFound(
            f"the model {name!r} does not exist; this server has {', '.join(state.model.names)}",
            param="model",
            code="model_not_found",
        )
    return OrjsonResponse(_model_object(state, name))


def _model_object(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(state.started_s),
        "owned_by": "dsserve",
        "root": state.model.root,
        "parent": None,
        "max_model_len": state.model.context_length,
        "capabilities": {
            "chat": True,
            "completions": True,
            "reasoning": True,
            "tools": True,
            "vision": False,
            "structured_output": False,
            "logprobs": False,
        },
    }
