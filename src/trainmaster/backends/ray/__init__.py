"""Ray clusters: attempts run as Ray jobs, by way of the dashboard's HTTP API. The server needs no Ray.

Each attempt is one Ray job. Its entry point is `driver.py` on the head node, which makes a placement group, starts one
actor for each node of the attempt, and waits. An actor starts `keeper.py`, which runs the worker and outlives the actor
by seconds, so that nothing of the worker remains however the actor ended.
"""
