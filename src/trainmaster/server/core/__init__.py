"""The pure core: jobs, states, resources and every decision about them.

Functions of frozen values and `now`; no database, no HTTP, no clock, no files. Imports the standard
library, pydantic and `trainmaster.protocol` only.
"""
