"""Fork servers: which one a run uses, and what it imports before the fork."""
