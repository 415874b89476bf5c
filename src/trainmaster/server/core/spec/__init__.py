"""The job spec. Requests are strict, and every problem is named with its path; stored specs are read tolerantly.
`configs` and `data` need pydantic alone and are read in job processes, too."""
