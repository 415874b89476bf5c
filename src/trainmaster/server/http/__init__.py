"""The REST API and the gateway: routes, credentials, answers and errors. Decides nothing.

A route parses, calls a command or reads the store, and renders. `trainmaster.server.app` makes the application.
"""
