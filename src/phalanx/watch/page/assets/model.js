// The run as it is known here. Updates are folded into it; what has changed is noted, so that only that is drawn.

import { UNSEEN } from "./phases.js";

export const TICK = 0.1; // seconds a letter
export const FELL = 3; // seconds that a rank is shown dead, though another has its place at once: people are slower
const LATE = 15; // seconds: news that are older, of a server that was busy, are only told
const MOST = 12000; // letters of a rank that are kept of what comes live
const BACK = 100; // letters: further back, somebody has set the clock
const TOLD = 500;
const POINTS = 4000;

// The order of watch/page/protocol.py's Row.
const FIELDS = [
  "rank", "node", "host", "device", "pid", "health", "phase", "step", "rate", "samples", "data", "compute", "waiting",
  "cpu", "memory", "gpu", "gpuMemory", "silent", "place",
];

export class Changes {
  whole = false;
  head = false;
  ranks = new Set();
  seats = false; // ranks came or went, or sit elsewhere
  health = false;
  fell = []; // ranks, which are to rise again
  strips = false;
  curves = new Set();
  told = false;
  verdicts = false;
  roll = false;
  links = false;
  chosen = false;
}

export class Model {
  head = null;
  heard = 0; // when, by this browser's clock, in milliseconds since it loaded
  ranks = new Map();
  order = []; // of ranks
  strips = new Map(); // rank -> {start (ticks since 1970), letters}
  curves = new Map(); // name -> [[step, time, value], …]
  told = [];
  fell = new Set(); // ranks that have died just now
  verdicts = [];
  held = []; // [rank, share of the last minute that others waited for it, its phase]
  roll = null;
  links = [];
  measured = 0;
  chosen = 0;
  still = false; // it is what was kept of a run

  apply(update, whole, changes) {
    if (whole) this.#forget(changes);
    this.#beHead(update.head, changes);
    for (const row of update.rows ?? []) this.#row(row, changes);
    for (const rank of update.gone ?? []) this.#gone(rank, changes);
    if (changes.seats) this.order = [...this.ranks.keys()].sort((one, other) => one - other);
    for (const [rank, [start, letters]] of Object.entries(update.strips ?? {})) {
      this.#strip(Number(rank), start, letters, changes);
    }
    for (const [name, points] of Object.entries(update.curves ?? {})) this.#points(name, points, changes);
    if (update.told?.length) {
      this.told.push(...update.told);
      this.told.splice(0, this.told.length - TOLD);
      changes.told = true;
      for (const one of update.told) if (one.kind === "fault") this.#falls(one, whole ? FELL : LATE, changes);
    }
    const verdicts = update.verdicts ?? [];
    const said = (told) => told.map((one) => one.text).join("\n");
    if (said(verdicts) !== said(this.verdicts)) changes.verdicts = true;
    this.verdicts = verdicts;
    this.held = update.held ?? [];
    if (update.roll || this.roll) changes.roll = true;
    this.roll = update.roll ?? null;
    if (update.links?.length) {
      this.links = update.links;
      this.measured = update.measured ?? 0;
      changes.links = true;
    }
  }

  // It has been dead for long enough.
  rises(rank, changes) {
    const view = this.ranks.get(rank);
    if (!this.fell.delete(rank) || !view) return;
    view.health = view.is;
    changes.ranks.add(rank);
    changes.health = true;
  }

  #falls(fault, late, changes) {
    if (this.ended || this.head.now - fault.time > late) return;
    for (const rank of fault.ranks ?? []) {
      const view = this.ranks.get(rank);
      if (!view) continue;
      this.fell.add(rank);
      changes.fell.push(rank);
      view.health = "dead";
      changes.ranks.add(rank);
      changes.health = true;
    }
  }

  get ended() {
    return this.head !== null && this.head.ended != null;
  }

  // Of the run, now: its clock goes on between two updates, unless there are none to come.
  get now() {
    if (this.ended) return this.head.ended;
    if (this.still) return this.head.now;
    return this.head.now + (performance.now() - this.heard) / 1000;
  }

  // When the newest letter ends.
  get newest() {
    let last = 0;
    for (const strip of this.strips.values()) last = Math.max(last, strip.start + strip.letters.length);
    return last ? last * TICK : this.head?.now ?? 0;
  }

  get oldest() {
    let first = Infinity;
    for (const strip of this.strips.values()) if (strip.letters) first = Math.min(first, strip.start);
    return first === Infinity ? this.head?.started ?? 0 : first * TICK;
  }

  letter(rank, tick) {
    const strip = this.strips.get(rank);
    return strip?.letters[tick - strip.start] ?? UNSEEN;
  }

  #forget(changes) {
    this.ranks.clear();
    this.strips.clear();
    this.curves.clear();
    this.told = [];
    this.verdicts = [];
    this.links = [];
    this.roll = null;
    Object.assign(changes, {
      whole: true, seats: true, health: true, strips: true, told: true, verdicts: true, roll: true, links: true,
    });
  }

  #beHead(head, changes) {
    this.head = head;
    this.heard = performance.now();
    changes.head = true;
  }

  #row(row, changes) {
    const view = {};
    FIELDS.forEach((name, place) => (view[name] = row[place]));
    view.is = view.health;
    if (this.fell.has(view.rank)) view.health = "dead";
    const was = this.ranks.get(view.rank);
    if (!was || was.node !== view.node || was.host !== view.host || was.device !== view.device) changes.seats = true;
    if (!was || was.health !== view.health) changes.health = true;
    this.ranks.set(view.rank, view);
    changes.ranks.add(view.rank);
  }

  #gone(rank, changes) {
    if (this.ranks.delete(rank)) changes.seats = changes.health = true;
    this.strips.delete(rank);
    this.fell.delete(rank); // whoever has its place later has not died
  }

  #strip(rank, start, letters, changes) {
    const first = Math.round(start / TICK);
    const strip = this.strips.get(rank);
    changes.strips = true;
    if (!strip) {
      this.strips.set(rank, { start: first, letters });
      return;
    }
    const gap = first - strip.start - strip.letters.length;
    if (gap > MOST || gap < -letters.length - BACK) {
      this.strips.set(rank, { start: first, letters });
      return;
    }
    if (gap < -letters.length) return; // what is known already is not told twice; where nobody looked there is a gap
    strip.letters += gap >= 0 ? UNSEEN.repeat(gap) + letters : letters.slice(-gap);
    if (strip.letters.length > MOST * 1.1) {
      strip.start += strip.letters.length - MOST;
      strip.letters = strip.letters.slice(-MOST);
    }
  }

  #points(name, points, changes) {
    const curve = this.curves.get(name) ?? [];
    this.curves.set(name, curve);
    curve.push(...points);
    if (curve.length > POINTS) this.curves.set(name, curve.filter((_, place) => place % 2 === 0 || place === curve.length - 1));
    changes.curves.add(name);
  }
}
