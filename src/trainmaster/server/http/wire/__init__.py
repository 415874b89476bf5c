"""The shapes of answers and of request bodies, one module for each resource; each knows how it is made."""
