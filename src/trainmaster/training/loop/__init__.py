"""Training by the engine's model under a loop of our own: batches, model, optimizer, and the loop itself."""
