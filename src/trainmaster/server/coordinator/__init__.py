"""The shell around the pure core: commands, and the leader's loop. Nothing here decides what a status should be."""
