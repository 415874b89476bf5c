"""`python -m trainmaster`: the same as the `trainmaster` command."""

from __future__ import annotations

from trainmaster.cli import main

if __name__ == "__main__":
    main()
