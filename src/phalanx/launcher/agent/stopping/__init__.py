"""How a run ends on a node: signals, shutdown, exits that hang, and processes that ranks left running."""
