"""Run a command in a separate network with nothing but loopback: isolate.py COMMAND...

Some of the systems compared here listen on all interfaces without authentication. Exits with 77, having run nothing, if
the kernel does not allow such a network.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

NEW_NETWORK, NEW_USER = 0x40000000, 0x10000000
GET_FLAGS, SET_FLAGS, UP = 0x8913, 0x8914, 1
NOT_POSSIBLE = 77


def enter() -> bool:
    """Leave the machine's network; False if that is not allowed."""
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(NEW_NETWORK) == 0:
        return True
    uid, gid = os.getuid(), os.getgid()
    if unshare(NEW_USER | NEW_NETWORK):
        return False
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    return True


def loopback_up() -> None:
    """Bring up loopback, which is down in a new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = b"lo".ljust(16, b"\0")
        flags = struct.unpack_from("16sh", fcntl.ioctl(any_socket, GET_FLAGS, name + bytes(16)))[1]
        fcntl.ioctl(any_socket, SET_FLAGS, name + struct.pack("h", flags | UP) + bytes(14))


def main() -> None:
    try:
        possible = sys.platform == "linux" and enter()
        if possible:
            loopback_up()
    except OSError:
        possible = False
    if not possible:
        sys.exit(NOT_POSSIBLE)
    if len(sys.argv) > 1:
        os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
