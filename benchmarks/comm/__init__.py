"""How fast ranks communicate: `phalanx bench comm`. `ranks` measures in each rank, `report` shows the results."""
