"""The pure core: jobs and every decision about them, as functions of frozen values and `now`. No database, HTTP, clock
or files; imports the standard library, pydantic and `trainmaster.protocol` only."""
