"""Training runtimes from files of the server, which clients read."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from trainmaster.server.coordinator.operator_files import RuntimeDocument, RuntimeFiles
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, Wire, ok
from trainmaster.server.http.router import StrictRoute, errors


class RuntimeResource(Wire):
    """A training runtime."""

    name: str
    kind: str = Field(description="`ClusterTrainingRuntime` or `TrainingRuntime`.")
    file: str = Field(description="The file that it is in.")
    document: dict[str, Any] = Field(description="As it was written, in the shape of Kubeflow's.")


class RuntimeProblem(Wire):
    """What is wrong with a file."""

    file: str
    message: str


class RuntimeList(Wire):
    """All training runtimes of the server."""

    runtimes: list[RuntimeResource]
    problems: list[RuntimeProblem] = Field(description="Files of which something cannot be used.")


def runtime_resource(runtime: RuntimeDocument) -> RuntimeResource:
    """One runtime."""
    return RuntimeResource(name=runtime.name, kind=runtime.kind, file=runtime.file, document=dict(runtime.document))


def runtime_list(found: RuntimeFiles) -> RuntimeList:
    """What a directory has."""
    return RuntimeList(
        runtimes=[runtime_resource(runtime) for runtime in found.runtimes],
        problems=[RuntimeProblem(file=each.file, message=each.message) for each in found.broken],
    )


router = APIRouter(route_class=StrictRoute, tags=["runtimes"])

RuntimeName = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]


@router.get("/runtimes", response_model=Ok[RuntimeList], responses=errors())
async def list_runtimes(
    principal: Viewer,  # noqa: ARG001 - it is what lets the request in
    context: Context,
) -> Response:
    """List the runtimes of this server, for every account the same; built-in ones are the clients'."""
    return ok(runtime_list(await run_in_threadpool(context.runtimes)))


@router.get("/runtimes/{name}", response_model=Ok[RuntimeResource], responses=errors(HTTPStatus.NOT_FOUND))
async def show_runtime(
    principal: Viewer,  # noqa: ARG001 - it is what lets the request in
    context: Context,
    name: RuntimeName,
) -> Response:
    """Show one runtime."""
    return ok(runtime_resource((await run_in_threadpool(context.runtimes)).get(name)))
