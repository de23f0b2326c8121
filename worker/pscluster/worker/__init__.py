"""Workers: run the functions that the coordinator hands out, and the client that others talk to them with."""
