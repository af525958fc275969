"""Whether the server lives, whether it is ready, and its metrics. None of these waits for anything."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.api.service import Service
from server.metrics import CONTENT_TYPE

router = APIRouter()
metrics_router = APIRouter()


def _status(is_good: bool, good: str, bad: str) -> Response:
    return JSONResponse({"status": good if is_good else bad}, 200 if is_good else 503)


@router.get("/livez")
async def livez(request: Request) -> Response:
    """200 unless the engine failed and the process is about to end; also while the model is being loaded."""
    service: Service = request.app.state.service
    return _status(service.is_alive, "alive", "failed")


@router.get("/readyz")
@router.get("/health")
async def readyz(request: Request) -> Response:
    """200 while chat requests are taken."""
    service: Service = request.app.state.service
    return _status(service.is_ready, "ready", "not ready")


@metrics_router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)
