"""Foreign APIs that clients of other services speak: one folder for each."""
