"""Names of the deployments, as the Serve config uses them."""

TARGET_NAME = "Target"
DRAFT_NAME = "Draft"
ORCHESTRATOR_NAME = "Orchestrator"
