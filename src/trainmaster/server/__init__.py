"""The control plane: one program that keeps jobs, decides what runs, and answers clients."""
