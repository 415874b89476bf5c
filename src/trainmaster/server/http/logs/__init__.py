"""Logs of jobs: from the raw output that lies in run directories to lines, pages and something to follow."""
