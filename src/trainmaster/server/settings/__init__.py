"""How a server is configured: settings from a TOML file, the environment and flags, listener, encryption, telemetry."""
