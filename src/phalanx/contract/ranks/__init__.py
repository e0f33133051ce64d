"""Where ranks run: the placement of one, and the nodes of all."""
