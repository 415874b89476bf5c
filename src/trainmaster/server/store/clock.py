"""The time by the database's own clock, which is one for all servers. Each kind of database spells it its own way."""

from __future__ import annotations

from sqlalchemy import Double
from sqlalchemy.sql.functions import FunctionElement


class database_time(FunctionElement[float]):  # noqa: N801 - read as a function of SQL
    """Unix seconds, now: not when the transaction began."""

    type = Double()
    inherit_cache = True
