"""The routes, one module for each resource. Each has a `router`."""
