"""The Fireworks door: the routes that `fireworks-ai` calls, as views over the commands that every door has."""

from trainmaster.server.doors.fireworks import checkpoints, errors, jobs, models, resources, trainers

RESOURCES = (resources.router, errors.router)
"""The routes of jobs, checkpoints, shapes and models, and those of deployments, which refuse."""
TRAINERS = trainers.router
"""The routes of requests to a trainer."""

__all__ = ["RESOURCES", "TRAINERS", "checkpoints", "jobs", "models"]
