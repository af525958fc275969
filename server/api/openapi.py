"""The OpenAPI document. Routes read their bodies themselves, off the event loop, so their schemas are added by hand."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

COMPONENTS = "#/components/schemas/{model}"


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The `requestBody` of a route that takes `model` as JSON."""
    schema = {"$ref": COMPONENTS.format(model=model.__name__)}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def describe(app: FastAPI, *models: type[BaseModel]) -> None:
    """Let the application's document define the bodies' models; it is made once, when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=COMPONENTS)
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
