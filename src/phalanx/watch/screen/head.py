"""The first lines: which run, how it is, and how far."""

from __future__ import annotations

from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import numbers, text
from phalanx.watch.screen.canvas import Canvas
from phalanx.watch.screen.signs import STYLES, Signs
from phalanx.watch.screen.text import Line


def draw(scene: RunModel, canvas: Canvas, now: float) -> list[Line]:
    return [_who(scene, canvas.width, now, canvas.signs), _progress(scene, canvas.width, canvas.signs)]


def state(scene: RunModel) -> str:
    if scene.state == "failed" and scene.code is not None:
        return f"failed (exit code {scene.code})"
    if scene.state == "gathering" and scene.roll is not None:
        return f"gathering: {len(scene.roll.here)} of {scene.roll.expected} here"
    return scene.state


def loss(scene: RunModel) -> tuple[str, float] | None:
    """What is drawn as the curve: the loss, or whatever else was measured first."""
    name = next((name for name in scene.curves if "loss" in name.lower()), None)
    name = name or next((name for name in scene.curves if name not in ("steps/s", "samples/s")), None)
    last = scene.curves[name].last if name is not None else None
    return (name, last) if name is not None and last is not None else None


def _who(scene: RunModel, width: int, now: float, signs: Signs) -> Line:
    dot = f" {signs.dot} "
    many = scene.world_size or len(scene.ranks)
    words = [_plural(scene.nodes or 1, "node"), _plural(many, "rank")]
    words += [f"{'generation' if width >= 100 else 'gen'} {scene.generation}"] if scene.generation else []
    words += [f"attempt {scene.attempt}"] if scene.attempt else []
    line: Line = [
        (" ", ""),
        (text.clean(scene.run) or "a run", "bold"),
        ("  ", ""),
        (text.cut(text.clean(state(scene)), 40, signs.dots), f"bold {STYLES.get(scene.state, '')}"),
        ("  ", ""),
        (dot.join(words), ""),
    ]
    until = scene.ended if scene.ended is not None else max(now, scene.now)
    lasted = numbers.span(until - scene.started) if scene.started else ""
    right = f"{'took' if scene.ended is not None else 'up'} {lasted} " if lasted else ""
    more = f"goodput {numbers.share(scene.goodput)}{dot}{right}" if scene.step >= 0 else right
    return text.spread(line, [(more if text.length(line) + text.width(more) < width else right, "dim")], width)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _progress(scene: RunModel, width: int, signs: Signs) -> Line:
    dot = f" {signs.dot} "
    if scene.step < 0:
        begun = " no steps yet" if scene.ended is None else " no steps were seen"
        return text.clip([(begun, "dim")], width)
    line: Line = [(" step ", ""), (str(scene.step), "bold")]
    if scene.total:
        done = min(scene.step / scene.total, 1.0)
        line.append((f"/{scene.total} ", ""))
        if width >= 100:
            full = round(done * 20)
            line += [(signs.compute * full, "good"), (signs.waiting * (20 - full), "dim"), (" ", "")]
        line.append((f"{done * 100:.0f}%", ""))
    for word in _measures(scene):  # as many as there is room for
        if text.length(line) + len(dot) + text.width(word) < width:
            line.append((dot + word, ""))
    return text.clip(line, width)


def _measures(scene: RunModel) -> list[str]:
    words: list[str] = []
    if scene.left is not None and scene.state == "running":
        words.append(f"{numbers.about(scene.left)} left")
    if scene.ended is None:
        words.append(f"{numbers.rate(scene.rate)} steps/s")
    found = loss(scene)
    if found is not None:
        words.append(f"{text.clean(found[0])} {numbers.value(found[1])}")
    if scene.ended is None and scene.samples >= 0:
        words.append(f"{numbers.rate(scene.samples)} samples/s")
    if scene.lost >= 1:
        words.append(f"{numbers.about(scene.lost)} lost")
    return words
