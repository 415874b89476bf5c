"""What the Fireworks door sends and takes: JSON as protocol buffers write it, in the words of its public clients."""
