"""The configurations of backends, where programs written for Kubeflow import them from."""
