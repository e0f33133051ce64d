"""How the agents of a run find, trust and hear each other: one leader, any number of members."""
