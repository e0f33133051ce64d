"""The first lines: the run, its state and its progress."""

from __future__ import annotations

from phalanx.watch.model.run_model import RunModel
from phalanx.watch.screen import numbers
from phalanx.watch.screen.signs import STATE_STYLES, Signs
from phalanx.watch.screen.terminal import text
from phalanx.watch.screen.terminal.canvas import Canvas
from phalanx.watch.screen.terminal.text import Line


def draw(model: RunModel, canvas: Canvas, now: float) -> list[Line]:
    """Return the first two lines."""
    return [_who(model, canvas.width, now, canvas.signs), _progress(model, canvas.width, canvas.signs)]


def state(model: RunModel) -> str:
    """Return the state of the run."""
    if model.run.state == "gathering" and model.run.rendezvous is not None:
        return f"waiting for nodes: {len(model.run.rendezvous.joined)} of {model.run.rendezvous.expected} joined"
    return model.run.words


def loss(model: RunModel) -> tuple[str, float] | None:
    """Return name and latest value of the curve to draw: the loss, or else the first metric."""
    name = next((name for name in model.progress.curves if "loss" in name.lower()), None)
    name = name or next((name for name in model.progress.curves if name not in ("steps/s", "samples/s")), None)
    last = model.progress.curves[name].last if name is not None else None
    return (name, last) if name is not None and last is not None else None


def _who(model: RunModel, width: int, now: float, signs: Signs) -> Line:
    dot = f" {signs.dot} "
    many = model.ranks.world_size or len(model.ranks)
    words = [_plural(model.ranks.nodes or 1, "node"), _plural(many, "rank")]
    words += [f"{'generation' if width >= 100 else 'gen'} {model.run.generation}"] if model.run.generation else []
    words += [f"attempt {model.run.attempt}"] if model.run.attempt else []
    line: Line = [
        (" ", ""),
        (text.clean(model.run.name) or "a run", "bold"),
        ("  ", ""),
        (text.cut(text.clean(state(model)), 40, signs.dots), f"bold {STATE_STYLES.get(model.run.state, '')}"),
        ("  ", ""),
        (dot.join(words), ""),
    ]
    until = model.run.ended if model.run.ended is not None else max(now, model.now)
    lasted = numbers.span(until - model.run.started) if model.run.started else ""
    right = f"{'took' if model.run.ended is not None else 'elapsed'} {lasted} " if lasted else ""
    more = f"goodput {numbers.share(model.goodput)}{dot}{right}" if model.progress.step >= 0 else right
    return text.spread(line, [(more if text.length(line) + text.width(more) < width else right, "dim")], width)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _progress(model: RunModel, width: int, signs: Signs) -> Line:
    dot = f" {signs.dot} "
    if model.progress.step < 0:
        begun = " no steps yet" if model.run.ended is None else " no steps"
        return text.clip([(begun, "dim")], width)
    line: Line = [(" step ", ""), (str(model.progress.step), "bold")]
    if model.progress.total:
        done = min(model.progress.step / model.progress.total, 1.0)
        line.append((f"/{model.progress.total} ", ""))
        if width >= 100:
            full = round(done * 20)
            line += [(signs.compute * full, "good"), (signs.waiting * (20 - full), "dim"), (" ", "")]
        line.append((f"{done * 100:.0f}%", ""))
    for word in _measures(model):  # as many as fit
        if text.length(line) + len(dot) + text.width(word) < width:
            line.append((dot + word, ""))
    return text.clip(line, width)


def _measures(model: RunModel) -> list[str]:
    words: list[str] = []
    if model.progress.epoch:
        of = f"/{model.progress.epochs}" if model.progress.epochs else ""
        words.append(f"epoch {model.progress.epoch}{of}")
    if model.progress.eta is not None and model.run.state == "running":
        words.append(f"ETA {numbers.about(model.progress.eta)}")
    if model.run.ended is None:
        words.append(f"{numbers.rate(model.progress.rate)} steps/s")
    found = loss(model)
    if found is not None:
        words.append(f"{text.clean(found[0])} {numbers.value(found[1])}")
    if model.run.ended is None and model.progress.samples >= 0:
        words.append(f"{numbers.rate(model.progress.samples)} samples/s")
    if model.lost >= 1:
        words.append(f"{numbers.about(model.lost)} lost")
    return words
