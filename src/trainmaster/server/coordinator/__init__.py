"""The shell around the pure core: commands that users give, and the leader's loop.

View -> pure core -> one commit -> act. Nothing here decides what a status should be.
"""
