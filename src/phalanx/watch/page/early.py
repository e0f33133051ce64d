"""Everything, each time."""

from __future__ import annotations

import msgspec

from phalanx.watch.page.protocol import Head, Row, Told, Update
from phalanx.watch.scene import Happening, Scene


class Updates:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._told = 0
        self._points: dict[str, int] = {}

    def whole(self) -> Update:
        return self._made(told=tuple(map(_told, self._scene.happenings)))

    def update(self) -> Update | None:
        return self._made(told=())

    def _made(self, told: tuple[Told, ...]) -> Update:
        scene = self._scene
        names = list(Row.__struct_fields__)
        return Update(
            at=scene.now,
            head=Head(
                run=scene.run,
                command=" ".join(scene.command),
                nodes=len({rank.node for rank in scene.ranks.values()}),
                left=None,
                **{
                    name: getattr(scene, name)
                    for name in Head.__struct_fields__
                    if name not in ("run", "command", "nodes", "left")
                },
            ),
            rows=tuple(Row(**{name: getattr(rank, name) for name in names}) for rank in scene.ranks.values()),
            told=told,
            verdicts=tuple(map(_told, scene.verdicts)),
            roll=msgspec.to_builtins(scene.roll) if scene.roll is not None else None,
        )


def _told(happening: Happening) -> Told:
    return Told(
        time=happening.time,
        kind=happening.kind,
        text=happening.text,
        ranks=happening.ranks,
        seconds=happening.seconds,
    )
