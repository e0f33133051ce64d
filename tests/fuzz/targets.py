"""The targets of the campaign: 100,000 cases in total."""

from __future__ import annotations

from tests.fuzz import command_lines, frames, manifests, page_requests, store_values
from tests.fuzz.campaign import Target

TARGETS = {
    target.name: target
    for target in (
        Target("frames", 40_000, frames.opened),
        Target("store", 20_000, store_values.opened),
        Target("manifests", 25_000, manifests.opened),
        Target("command-lines", 10_000, command_lines.opened),
        Target("page", 5_000, page_requests.opened),
    )
}
