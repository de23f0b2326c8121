"""What all roles share: cluster description, geometry, codecs, channels, errors, lifecycle. Knows no role."""

import os

# gRPC's own log lines tell of every connection that ends, which is what we expect of processes that die; what
# matters of it is in our errors. Read when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
