"""What is served: the model list in OpenAI's shape, and the server's version."""

import time
from typing import Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from server import __version__
from server.api.service import Service
from server.errors import NotFoundError

router = APIRouter()
version_router = APIRouter()

STARTED_AT: Final = int(time.time())


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `/v1/models`; `max_model_len` is null until the model is loaded."""

    id: str
    object: str = "model"
    created: int = STARTED_AT
    owned_by: str = "m3-server"
    max_model_len: int | None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/models`."""

    object: str = "list"
    data: list[Model]


def _model(request: Request) -> Model:
    service: Service = request.app.state.service
    ready = service.engine.ready
    return Model(id=service.settings.model_name, max_model_len=None if ready is None else ready.max_model_len)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The one model that is served."""
    return _json(ModelList(data=[_model(request)]))


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> Response:
    """That model by its name."""
    model = _model(request)
    if name != model.id:
        raise NotFoundError(f"this server serves {model.id}", param="model", code="model_not_found")
    return _json(model)


@version_router.get("/version")
async def version() -> Response:
    """The server's version."""
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")
