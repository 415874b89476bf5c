"""Iceberg tables as Arrow shards on local disk, made once for a snapshot; `jobs.data_cache` gives ranks their share."""
