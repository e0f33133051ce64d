"""How long nodes take to join a leader: `phalanx bench join`."""
