"""Models, adapters, losses, optimizer and sampling, driven one request at a time. PyTorch, and no HTTP and no jobs."""
