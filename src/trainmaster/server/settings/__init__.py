"""How a server's settings are found: a TOML file, the environment, flags; and what the file says of the cluster.

Later sources win: defaults, then the file, then the environment, then flags. Whatever is not known, or has a wrong
type or value, is a problem with its place, and stops the start.
"""
