"""Iceberg tables as columnar shards on local disk: made once for a snapshot, shared by all jobs of the account.

The shards are Arrow files with about as many rows each; `trainmaster.jobs.data_cache` gives ranks their share of them.
"""
