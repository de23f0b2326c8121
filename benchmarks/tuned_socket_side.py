"""The limit of what Python can do: `socket_side`, with connections set up like those of our data plane."""

from __future__ import annotations

import socket_side

from pscluster.core.transport.tcp.packets import tuned

if __name__ == "__main__":
    socket_side.main(__file__, tuned)
