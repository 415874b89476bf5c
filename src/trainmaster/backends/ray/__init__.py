"""Ray clusters: attempts run in placement groups, by way of the dashboard's HTTP API. The server needs no Ray.

A Trainmaster has one Ray job, `driver.py` on the head node, while it has attempts there. The driver makes a
placement group for each attempt and starts one actor for each of its nodes. An actor starts `keeper.py`, which runs the
worker and outlives the actor by seconds, so that nothing of the worker remains however the actor ended.
"""
