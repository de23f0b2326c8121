"""The data plane: calls with large or many messages, over TCP connections without HTTP/2.

Python's gRPC copies every byte three times more than a socket does and wakes a thread for every few kilobytes: two
processes on one machine move two to eight times as much over a socket (docs/performance.md has the figures). So a role
may open a second port, on which the same methods are served, by the same handlers behind the same interceptors; what
they are sent and send are the same protobuf messages. Everything can be done over gRPC alone: a client that can't reach
the port, or has the role by another address than its own (a proxy's, a tunnel's), stays there, and so does whoever
writes a client in another language. A role whose address is a Unix socket opens a second socket beside it instead of a
port; see `unix_sockets`.

Where the cluster has TLS, so has a connection, with the same certificates, which are asked for and looked at as on
gRPC's port; see `encryption`. It is TLS 1.3, without session tickets, and the server says READY once it has accepted
the client's certificate.

On a connection, in both directions: packets. 4 bytes for the size of the body, 1 for its kind, 1 mark and 2 zeros, all
little-endian; then the body.

    CALL     client    opens a call: DataCall
    MESSAGE  both      of the call
    END      client    it sends no more messages of this call
    STATUS   server    the call has ended: DataStatus
    HANDSHAKE, PROOF   before the first call, where there is a token; see authentication.proto
    READY    server    before all else, in TLS

One call at a time; the next one may follow behind a STATUS, if the client has sent its END. A call that is given up
ends with the connection, on either side; so does whatever goes wrong with the packets themselves. What was lost on its
way is found by TCP, as for gRPC: what is not acknowledged for 20 s, and 50 s of silence in which nobody answers.

    client  idle --CALL--> open --END--> ended --STATUS--> idle
                           open, ended --cancel, close, a broken connection--> gone
                           open --STATUS--> gone: what the client is still sending would be taken for the next call
    server  new --TLS; HANDSHAKE, PROOF--> idle; anything else is answered with a STATUS, and the connection closed
            idle --CALL--> in the handler --it returns, aborts or raises--> STATUS; what comes before END is dropped
            any  --the client is gone--> the context has ended, its callbacks are called; the handler's next read or
                                         write raises
            idle, and no call was ever accepted, for 10 s --> closed
            any  --its certificate was revoked--> closed, with its call

Linux only, which can tell that a peer has gone while nobody reads (EPOLLRDHUP).
"""
