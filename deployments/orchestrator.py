"""The orchestrator deployment: the HTTP ingress and the verification loop."""

from __future__ import annotations

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from deployments.clients import ServeDraft, ServeTarget
from deployments.names import DRAFT_NAME, TARGET_NAME
from specdec.api.app import create_app
from specdec.config import EngineConfig
from specdec.orchestrator.engine import SpeculationEngine
from specdec.runner.load import load_tokenizer, max_model_len


class OrchestratorDeployment:
    """Owns the truth about every sequence; the workers only hold caches.

    It is the ingress itself: tokens go from the loop to the client without another hop.
    """

    def __init__(self, config: EngineConfig, target: DeploymentHandle, draft: DeploymentHandle | None) -> None:
        self._config = config
        self._engine = SpeculationEngine(
            config,
            load_tokenizer(config.target),
            ServeTarget(target, TARGET_NAME),
            None if draft is None else ServeDraft(draft, DRAFT_NAME),
            max_model_len=max_model_len(config.target, config.target_worker),
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve asks for the application once the constructor is done."""
        # Serve's proxy adds the request id header by itself.
        return create_app(self._engine, self._config.api, send_request_id=False)

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):
            await self._engine.close()
