"""The tables of 0.1.0. Nothing runs here: a new database gets the tables of `schema` and the newest revision."""

from __future__ import annotations

revision = "0001"
down_revision = None
