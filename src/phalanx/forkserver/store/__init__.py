"""The store of a run: torch's TCPStore, behind a gate that only the ranks of the run pass.

    host.py          the process: heartbeat, end
    gate.py          the port that ranks know: accepts connections
    access.py        who may connect
    peers.py         which user has the other end of a TCP connection
    private_port.py  the port of torch's server, which only the gate reaches
    relay.py         a connection through the gate

torch's server accepts every connection, and can listen on nothing but TCP, which every user of a host can reach.
"""
