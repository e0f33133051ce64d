"""How the supervisors of a run find, trust and hear each other: one leader, any number of members."""
