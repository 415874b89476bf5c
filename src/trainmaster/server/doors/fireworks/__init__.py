"""The Fireworks door: the routes that `fireworks-ai` calls, as views over the commands that every door has."""

from fastapi import APIRouter

from trainmaster.server.doors.fireworks import checkpoints, jobs, models, trainers, unsupported

RESOURCES: tuple[APIRouter, ...] = (
    jobs.router,
    checkpoints.router,
    models.shape_router,
    models.router,
    unsupported.router,
)
"""The routes of jobs, checkpoints, shapes and models; those of deployments refuse."""
TRAINERS: APIRouter = trainers.router
"""The routes of requests to a trainer."""

__all__ = ["RESOURCES", "TRAINERS"]
