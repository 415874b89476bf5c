"""How long tests wait for what must happen: not a measure of anything, so it leaves room for a busy machine."""

PATIENCE_S = 300.0
