"""The data plane: calls with large or many messages, over TCP connections without HTTP/2.

Python's gRPC copies every byte three times more than a socket does and wakes a thread for every few kilobytes: two
processes on one machine move two to eight times as much over a socket (see docs/performance.md). So a role may open a
second port that serves the same methods and protobuf messages, with the same handlers behind the same interceptors.
gRPC alone is always enough: clients that can't reach the port, that dial the role by another address than its own (a
proxy's, a tunnel's), or that are written in another language use gRPC. A role whose address is a Unix socket opens a
second socket beside it instead of a port; see `unix_sockets`.

In a cluster with TLS a connection is encrypted, with the same certificates and the same checks as on gRPC's port; see
`encryption`. It is TLS 1.3, without session tickets, and the server sends READY once it has accepted the client's
certificate.

A connection carries packets in both directions: 4 bytes for the size of the body, 1 for its kind, 1 mark and 2 zeros,
all little-endian; then the body.

    CALL     client    opens a call: DataCall
    MESSAGE  both      a message of the call
    END      client    no more messages of this call follow
    STATUS   server    the call has ended: DataStatus
    HANDSHAKE, PROOF   before the first call, where there is a token; see authentication.proto
    READY    server    before all else, in TLS

A connection carries one call at a time; the next may follow a STATUS once the client has sent its END. Giving up a call
ends its connection, on either side; so does any error in the packets themselves. TCP detects lost connections, as for
gRPC: after 20 s without an acknowledgement of sent data, or 50 s of silence without an answer to probes.

    client  idle --CALL--> open --END--> ended --STATUS--> idle
                           open, ended --cancel, close, a broken connection--> gone
                           open --STATUS--> gone: messages still being sent would be taken for the next call
    server  new --TLS; HANDSHAKE, PROOF--> idle; anything else is answered with a STATUS, and the connection closed
            idle --CALL--> in the handler --it returns, aborts or raises--> STATUS; messages before END are dropped
            any  --the client disconnects--> the context ends, its callbacks are called; the handler's next read or
                                             write raises
            idle, and no call was ever accepted, for 10 s --> closed
            any  --its certificate was revoked--> closed, with its call

Linux only, which reports that a peer has disconnected while no thread reads (EPOLLRDHUP).
"""
