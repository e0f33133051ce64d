"""How something of one machine comes to all: from which machine to take it, to which to give it."""

from __future__ import annotations


def chain(mine: int, root: int, count: int) -> tuple[int | None, list[int]]:
    """Each gives to the next, so that what is long crosses every wire once."""
    place = (mine - root) % count
    return None if place == 0 else (mine - 1) % count, [(mine + 1) % count] if place < count - 1 else []


def tree(mine: int, root: int, count: int) -> tuple[int | None, list[int]]:
    """In fewest steps."""
    place = (mine - root) % count
    step = 1 << place.bit_length()  # the steps before this one have brought it here
    heirs = []
    while place + step < count:
        heirs.append((place + step + root) % count)
        step *= 2
    giver = place - (1 << (place.bit_length() - 1)) if place else None
    return None if giver is None else (giver + root) % count, heirs
