"""The rendezvous of the ranks: identity, meeting point, roll call, device."""
