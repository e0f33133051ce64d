"""Finds problems of a machine and between machines. Each check reads facts in one step and judges them in another."""
