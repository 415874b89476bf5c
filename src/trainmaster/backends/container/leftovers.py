"""What a server leaves behind that the next one has to look after."""

from __future__ import annotations

from trainmaster.backends import BackendContext
from trainmaster.backends.container.container_spec import RUNS
from trainmaster.backends.container.engine import EngineError, engine_of
from trainmaster.backends.container.plans import Plans

_TIMEOUT_S = 3.0
"""A server that ends waits for this."""


def are_any(context: BackendContext) -> bool:
    """Whether there are containers, networks or plans of a server; also where the engine does not say."""
    plans = Plans(context.data_dir.absolute() / "workers" / "plans")
    plans.clear()
    if plans.are_any:
        return True
    engine, label = engine_of(context, timeout_s=_TIMEOUT_S), f"{RUNS}={context.runs}"
    try:
        return bool(engine.containers(label) or engine.networks(label))
    except EngineError:
        return True
    finally:
        engine.close()
