"""Clusters of kind kubernetes: an attempt is an Indexed Job, and one watch for each kind of object follows them all."""
