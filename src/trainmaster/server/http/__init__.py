"""The REST API and the gateway: routes, wire types, credentials, the error envelope. Decides nothing.

`app.create_app` makes the application; a route parses, calls a command or reads the store, and renders.
May import `trainmaster.server.coordinator`, `store`, `storage`, `core` and `protocol`.
"""
