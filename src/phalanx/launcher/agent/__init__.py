"""The agent of one node: starts the workers, hears them, stops them."""
