"""The pure core: jobs, states, resources and every decision about them, as functions of frozen values and `now`.

No database, no HTTP, no clock, no files. Imports the standard library, pydantic and `trainmaster.protocol` only.
"""
