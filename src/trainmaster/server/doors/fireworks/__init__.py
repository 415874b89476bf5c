"""The Fireworks door: the routes that `fireworks-ai` calls, as views over the commands that every door has."""

from trainmaster.server.doors.door import Door
from trainmaster.server.doors.fireworks import checkpoints, errors, jobs, models, resources, trainers

DOOR = Door(
    name="fireworks",
    make=trainers.FireworksDoor,
    api_routers=(resources.router, errors.router),
    gateway_routers=(trainers.router,),
    failure=errors.failure_at,
    absent=errors.absent,
)

__all__ = ["DOOR", "checkpoints", "jobs", "models"]
