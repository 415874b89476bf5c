"""The store: jobs and everything around them in SQL. It decides nothing. `database` reads, and writes in groups;
modules of resources have functions that take a connection and a scope."""
