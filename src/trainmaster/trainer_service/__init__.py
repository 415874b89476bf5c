"""The trainer service: a front process that speaks HTTP, and an engine process that computes."""
