"""The Serve application: three deployments, wired. `serve run serve_config.yaml` begins here.

Replica counts, autoscaling and resources are Serve's own settings, in the config's ``deployments`` list. What is set
here is what the parts need to work together.
"""

# No `from __future__ import annotations`: Serve looks at the builder's annotation to make its argument.

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from deployments.names import DRAFT_NAME, ORCHESTRATOR_NAME, TARGET_NAME
from deployments.orchestrator import OrchestratorDeployment
from deployments.routing import LaneRouter
from deployments.workers import DraftDeployment, TargetDeployment
from specdec.config import EngineConfig
from specdec.runner.pair import require_sound_pair

# A worker's calls carry many sequences and its loop takes in any number of calls; a bound would only be a queue
# before the queue.
_MAX_WORKER_CALLS = 100_000
# Requests the API must be able to answer beyond those that decode or wait: health checks, refusals.
_SPARE_REQUESTS = 256


def build_app(args: EngineConfig) -> Application:
    """Build the application.

    Args:
        args: the ``args`` of the application in the Serve config.

    Raises:
        ConfigError: the settings contradict each other or the models, as far as can be told before loading them.
    """
    require_sound_pair(args)
    # Its constructor is annotated to take dicts only.
    lane_routing = RequestRouterConfig(request_router_class=LaneRouter)  # type: ignore[arg-type]
    as_worker = serve.deployment(max_ongoing_requests=_MAX_WORKER_CALLS, request_router_config=lane_routing)
    target = as_worker(TargetDeployment).options(name=TARGET_NAME).bind(args)
    draft = None
    if args.draft is not None and args.speculation.enabled:
        draft = as_worker(DraftDeployment).options(name=DRAFT_NAME).bind(args)
    as_ingress = serve.deployment(
        name=ORCHESTRATOR_NAME,
        max_ongoing_requests=args.loop.max_num_sequences + args.loop.max_queued_requests + _SPARE_REQUESTS,
    )
    return as_ingress(serve.ingress()(OrchestratorDeployment)).bind(args, target, draft)
