"""Nodes, slots, devices, cores, and the sources that describe them."""
