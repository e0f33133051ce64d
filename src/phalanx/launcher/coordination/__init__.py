"""How the agents of a run act together: single node, leader, follower, failover."""
