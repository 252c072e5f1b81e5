"""The application's description of itself (``/openapi.json``, ``/docs``).

The routes read their bodies themselves (to limit their size, and to be stricter than FastAPI), so FastAPI does not
see the request models; this module shows them to it.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from specdec.api.responses import ErrorBody
from specdec.api.schema import ChatCompletionRequest, CompletionRequest

_REF_TEMPLATE = "#/components/schemas/{model}"


class DescribedApp(FastAPI):
    """A FastAPI application whose description holds the request models too."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document; see FastAPI."""
        document = super().openapi()
        _, schemas = models_json_schema(
            [(CompletionRequest, "validation"), (ChatCompletionRequest, "validation")], ref_template=_REF_TEMPLATE
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that reads ``model`` from its body."""
    schema = {"$ref": _REF_TEMPLATE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_responses(answer: type) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that answers ``answer``, or an error."""
    return {200: {"model": answer}, "4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
