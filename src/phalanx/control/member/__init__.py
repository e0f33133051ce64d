"""A member of the control plane: its connection to the leader, and why the leader cannot be reached."""
