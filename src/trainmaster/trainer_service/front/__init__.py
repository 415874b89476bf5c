"""The front process: HTTP, order, deduplication and futures, so that a long step never delays a heartbeat. No torch."""
