"""Whether the server lives, whether it is ready, and its metrics. None of these waits for anything."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.api.service import Service, ServiceState
from server.metrics.registry import CONTENT_TYPE

router = APIRouter()
metrics_router = APIRouter()


@router.get("/livez")
async def livez(request: Request) -> Response:
    """200 unless the engine failed or something hangs, and the process is about to end; also while the model is loaded."""
    service: Service = request.app.state.service
    return JSONResponse({"state": "alive" if service.is_alive else "failed"}, 200 if service.is_alive else 500)


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """200 while requests are taken; the state says why not."""
    service: Service = request.app.state.service
    state = service.state
    return JSONResponse({"state": state.value}, 200 if state is ServiceState.READY else 503)


@router.get("/health")
async def health(request: Request) -> Response:
    """The same in two words, for routers that know no state."""
    service: Service = request.app.state.service
    is_ready = service.is_ready
    return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


@metrics_router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)
