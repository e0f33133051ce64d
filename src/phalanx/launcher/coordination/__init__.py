"""Coordination of the agents of a run: single node, leader, follower, failover."""
