"""From an untrusted document to a request that can be run, or to every problem with it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.spec.problems import problems_from
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.spec.unused import refuse_unused
from trainmaster.server.core.workloads import validate_workload

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_submit(document: object) -> SubmitJobRequest:
    """The request of a document. What comes back can be compiled into a launch.

    Raises:
        SpecError: the document has a wrong shape or value; it names every problem.
        RefusedError: it is well-formed, and asks for something that is not available.
    """
    request = parse(SubmitJobRequest, document)
    refuse_unused(request)
    validate_workload(request)
    return request


def parse(model: type[ModelT], document: object) -> ModelT:
    """A document as any model, with the same errors; for the bodies of other requests.

    Raises:
        SpecError: the document has a wrong shape or value; it names every problem.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = problems_from(error, model, document)
    # Outside of the handler: what pydantic says holds the values, which may be secrets.
    raise SpecError(problems)
