"""The coordinator of a node that another node leads, and the failover when that node is lost."""
