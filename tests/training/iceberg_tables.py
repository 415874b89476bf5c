"""Real tables of Iceberg, for tests."""

from __future__ import annotations

from pathlib import Path

from seaweed_server import KEY, SECRET, SeaweedServer

ROWS = range(10, 1000)
"""What the column `id` holds."""


def table_at(warehouse: str, directory: Path, **properties: str) -> str:
    """Where the metadata of a table lies: of two files, of one of which rows were deleted.

    Args:
        warehouse: the URI below which the table lies.
        directory: where its catalog may be kept.
        properties: how the warehouse is reached.
    """
    import pyarrow as pa
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("tests", uri=f"sqlite:///{directory}/catalog.db", warehouse=warehouse, **properties)
    catalog.create_namespace("made")
    table = catalog.create_table("made.rows", schema=pa.schema([("id", pa.int64()), ("text", pa.string())]))
    for low, high in ((0, 700), (700, ROWS.stop)):
        table.append(pa.table({"id": list(range(low, high)), "text": [f"row {n}" for n in range(low, high)]}))
    table.delete(f"id < {ROWS.start}")
    catalog.close()
    return str(table.metadata_location)


def table_on(seaweed: SeaweedServer, directory: Path) -> str:
    """Where the metadata of such a table lies on an object store."""
    keys = {"endpoint": seaweed.url, "access-key-id": KEY, "secret-access-key": SECRET, "region": "us-east-1"}
    return table_at(seaweed.new_prefix(), directory, **{f"s3.{name}": value for name, value in keys.items()})
