"""The coordinator of a node that another node leads, and what happens when that node is lost."""
