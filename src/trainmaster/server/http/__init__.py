"""The REST API and the gateway: routes parse, call a command or read the store, and render. They decide nothing."""
