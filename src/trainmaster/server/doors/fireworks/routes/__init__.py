"""The Fireworks door: the routes that `fireworks-ai` calls, as views over the commands that every door has."""

from fastapi import APIRouter

from trainmaster.server.doors.fireworks.routes import checkpoints, deployments, jobs, models, shapes, trainers

RESOURCES: tuple[APIRouter, ...] = (jobs.router, checkpoints.router, shapes.router, models.router, deployments.router)
"""What jobs, checkpoints, shapes and models are asked of; deployments are refused."""
TRAINERS: APIRouter = trainers.router
"""What is sent to a trainer."""

__all__ = ["RESOURCES", "TRAINERS"]
