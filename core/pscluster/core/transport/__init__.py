"""How processes talk: gRPC, and packets over TCP or Unix sockets (`tcp`), with the same methods and messages."""
