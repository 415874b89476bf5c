"""The built-in trainers, and the steps that prepare model and data; torch is imported when a training starts."""
