"""What the launch of a job says of the packages that it needs, and what the step that installs them leaves."""

PACKAGES_FILE = "packages.json"
"""Among a launch's inputs: `packages`, which are requirements as pip takes them, and `index_urls`."""
ENVIRONMENT_FILE = "environment.json"
"""In the node's prepared directory: `path`, the Python environment that the ranks run in."""
