"""Benchmarks of phalanx and its alternatives, side by side on one machine.

`phalanx bench NAME` runs them from a checkout of the repository; they are not part of the wheel.

- A *contender* is what is compared: a launcher, a training loop, a backend.
- A *round* runs every contender once, in an order that rotates, so that other load on the machine affects all equally.
- A *target* is a limit that was set before anything was measured.
"""
