"""What the server, the worker and the code inside a job agree on. Standard library only; decides nothing."""
