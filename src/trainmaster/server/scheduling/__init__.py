"""Pure planning: who runs next, where, and why not yet. Imports `trainmaster.server.core` only."""
