"""The store: jobs and everything around them in SQL.

`database` opens a database, reads from it and writes to it in groups; `schema` has the tables, and `records` maps rows
to dataclasses. The other modules are one for each resource, with functions that take a connection and a scope. The
store decides nothing.
"""
