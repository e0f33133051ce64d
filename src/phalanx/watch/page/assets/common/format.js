// Labels, numbers and times as text.

export const HEALTH = {
  // label and symbol: colour alone is not enough
  dead: ["dead", "✕"],
  stuck: ["stuck", "■"],
  silent: ["silent", "○"],
  slow: ["slow", "▾"],
  debugged: ["debugged", "◆"],
  waiting: ["waiting", "◐"],
  starting: ["starting", "◌"],
  healthy: ["healthy", "●"],
  stopped: ["stopped", "□"],
  done: ["done", "✓"],
};

export const STATE = {
  gathering: "waiting for nodes",
  starting: "starting",
  running: "running",
  stalled: "stalled",
  recovering: "recovering",
  stopping: "stopping",
  stopped: "stopped",
  done: "done",
  failed: "failed",
};

export const KIND = {
  joined: "+",
  fault: "✕",
  recovered: "✓",
  restarted: "↻",
  stalled: "■",
  verdict: "!",
  resumed: "▸",
  slow: "▾",
  preempted: "◇",
  note: "·",
  end: "▪",
};

export function rate(value) {
  if (!(value >= 0)) return "–";
  if (value >= 1e4) return short(value);
  if (value >= 100) return value.toFixed(0);
  return value.toFixed(value >= 10 ? 1 : 2);
}

export function count(value) {
  return value < 0 ? "–" : value.toLocaleString("en").replaceAll(",", "\u202f");
}

export function bytes(value, digits = 1) {
  if (!value) return "–";
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1000) return `${value.toFixed(unit === "B" || value >= 100 ? 0 : digits)} ${unit}`;
    value /= 1024;
  }
  return value < 1000 ? `${value.toFixed(value >= 100 ? 0 : digits)} GiB` : `${(value / 1024).toFixed(digits)} TiB`;
}

export const bandwidth = (value) => (value > 0 ? `${(value / 1e9).toFixed(value < 1e8 ? 3 : 1)} GB/s` : "–");

export const percent = (value) => (value >= 0 ? `${Math.round(value * 100)} %` : "–");

// 42 s, 3:07, 1:03:07, 2 d 01:03
export function span(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.floor(seconds));
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes}:${two(whole % 60)}`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours}:${two(minutes % 60)}:${two(whole % 60)}`;
  return `${Math.floor(hours / 24)} d ${two(hours % 24)}:${two(minutes % 60)}`;
}

// On the time axis, since the start: 0:07.3
export function offset(seconds, digits = 0) {
  const sign = seconds < 0 ? "−" : "";
  // Rounded before it is split: never show 60 seconds.
  const all = Math.round(Math.abs(seconds) * 10 ** digits) / 10 ** digits;
  const rest = (all % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  const minutes = Math.floor(all / 60);
  if (minutes < 60) return `${sign}${minutes}:${rest}`;
  return `${sign}${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${rest}`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString("en-GB");
}

// 0.00084, 20k, 1.5M, 3e-5: as in watch/charts/axis.py.
export function short(value, digits = 3) {
  const round = Number(value.toPrecision(digits));
  const size = Math.abs(round);
  if (size >= 1e15 || (size && size < 1e-4)) return round.toExponential().replace("e+", "e");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= (unit === 1e3 ? 1e4 : unit)) return `${Number((round / unit).toPrecision(digits))}${letter}`;
  }
  return String(round);
}

// A measured value, as in watch/charts/formatting.py: 2.301, 0.00084, 15.9k
export function measure(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(Number(value.toPrecision(4)));
  return short(value, size >= 1e-3 && size < 1e4 ? 4 : 3);
}

// 0–3, 8
export function ranges(ranks) {
  const sorted = [...ranks].sort((one, other) => one - other);
  const parts = [];
  for (let first = 0; first < sorted.length; ) {
    let last = first;
    while (sorted[last + 1] === sorted[last] + 1) last++;
    parts.push(last > first + 1 ? `${sorted[first]}–${sorted[last]}` : sorted.slice(first, last + 1).join(", "));
    first = last + 1;
  }
  return parts.join(", ");
}

// The reverse: "0-3,8" -> [0, 1, 2, 3, 8]; empty or "all": null; invalid: undefined
export function ranksOf(text, most) {
  const trimmed = text.trim();
  if (!trimmed || trimmed === "all") return null;
  const ranks = new Set();
  for (const part of trimmed.split(/[\s,]+/)) {
    const found = /^(\d+)(?:[-–](\d+))?$/.exec(part);
    if (!found) return undefined;
    const last = Math.min(Number(found[2] ?? found[1]), most - 1);
    for (let rank = Number(found[1]); rank <= last; rank++) ranks.add(rank);
  }
  return [...ranks];
}
