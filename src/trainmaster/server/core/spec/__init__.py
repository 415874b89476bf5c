"""The job spec: what a request may say, how it is read, stored and shown.

Requests are strict: unknown fields are refused, and every problem is named with its path. Stored specs are read
tolerantly. `configs` and `data` need pydantic alone and are read in job processes, too.
"""
