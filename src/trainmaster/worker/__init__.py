"""The worker: supervises one node of one attempt. Standard library and `trainmaster.protocol` only."""
