"""The workers of one node: starting, stopping and replacing them, and what they report."""
