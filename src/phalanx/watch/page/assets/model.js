// The state of the run. Updates are folded into it; `Changes` records what has changed, so that only that is drawn.

import { UNSEEN } from "./phases.js";

export const TICK = 0.1; // seconds per letter
export const SHOWN_DEAD = 3; // seconds for which a failed rank is shown as dead, even if it is replaced sooner
const LATE = 15; // seconds: older faults (from a busy server) are only listed
const MOST = 12000; // letters per rank
const BACK = 100; // letters: a time further back means that the clock was set
const EVENTS = 500;
const POINTS = 4000;

// The order of RankRow in watch/page/protocol.py.
const FIELDS = [
  "rank", "node", "host", "device", "pid", "health", "phase", "step", "rate", "samples", "data", "compute", "waiting",
  "cpu", "memory", "gpu", "gpuMemory", "silent", "place",
];

export class Changes {
  whole = false;
  head = false;
  ranks = new Set();
  placement = false; // ranks were added or removed, or run elsewhere
  health = false;
  died = []; // ranks
  strips = false;
  curves = new Set();
  events = false;
  verdicts = false;
  rendezvous = false;
  links = false;
  metadata = false;
  chosen = false;
}

export class Model {
  head = null;
  receivedAt = 0; // milliseconds since the page was loaded
  ranks = new Map();
  order = []; // of ranks
  strips = new Map(); // rank -> {start (ticks since 1970), letters}
  curves = new Map(); // name -> [[step, time, value], …]
  events = [];
  died = new Set(); // ranks that have failed just now
  verdicts = [];
  stragglers = []; // [rank, share of the last minute that others waited for it, phase]
  rendezvous = null;
  links = [];
  metadata = null; // of contract/run_metadata.py
  measured = 0;
  chosen = 0;
  finished = false; // the data of a report

  apply(update, whole, changes) {
    if (whole) this.#clear(changes);
    this.#setHead(update.head, changes);
    for (const row of update.rows ?? []) this.#row(row, changes);
    for (const rank of update.gone ?? []) this.#gone(rank, changes);
    if (changes.placement) this.order = [...this.ranks.keys()].sort((one, other) => one - other);
    for (const [rank, [start, letters]] of Object.entries(update.strips ?? {})) {
      this.#strip(Number(rank), start, letters, changes);
    }
    for (const [name, points] of Object.entries(update.curves ?? {})) this.#points(name, points, changes);
    if (update.events?.length) {
      this.events.push(...update.events);
      this.events.splice(0, this.events.length - EVENTS);
      changes.events = true;
      for (const one of update.events) if (one.kind === "fault") this.#markDead(one, whole ? SHOWN_DEAD : LATE, changes);
    }
    const verdicts = update.verdicts ?? [];
    const texts = (list) => list.map((one) => one.text).join("\n");
    if (texts(verdicts) !== texts(this.verdicts)) changes.verdicts = true;
    this.verdicts = verdicts;
    this.stragglers = update.stragglers ?? [];
    if (update.rendezvous || this.rendezvous) changes.rendezvous = true;
    this.rendezvous = update.rendezvous ?? null;
    if (update.metadata) {
      this.metadata = update.metadata;
      changes.metadata = true;
    }
    if (update.links?.length) {
      this.links = update.links;
      this.measured = update.measured ?? 0;
      changes.links = true;
    }
  }

  // Show the real health of a failed rank again.
  revive(rank, changes) {
    const view = this.ranks.get(rank);
    if (!this.died.delete(rank) || !view) return;
    view.health = view.realHealth;
    changes.ranks.add(rank);
    changes.health = true;
  }

  #markDead(fault, late, changes) {
    if (this.ended || this.head.now - fault.time > late) return;
    for (const rank of fault.ranks ?? []) {
      const view = this.ranks.get(rank);
      if (!view) continue;
      this.died.add(rank);
      changes.died.push(rank);
      view.health = "dead";
      changes.ranks.add(rank);
      changes.health = true;
    }
  }

  get ended() {
    return this.head !== null && this.head.ended != null;
  }

  // The time of the run: its clock runs on between two updates.
  get now() {
    if (this.ended) return this.head.ended;
    if (this.finished) return this.head.now;
    return this.head.now + (performance.now() - this.receivedAt) / 1000;
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

  #clear(changes) {
    this.ranks.clear();
    this.strips.clear();
    this.curves.clear();
    this.events = [];
    this.verdicts = [];
    this.links = [];
    this.metadata = null;
    this.rendezvous = null;
    Object.assign(changes, {
      whole: true, placement: true, health: true, strips: true, events: true, verdicts: true, rendezvous: true, links: true,
    });
  }

  #setHead(head, changes) {
    this.head = head;
    this.receivedAt = performance.now();
    changes.head = true;
  }

  #row(row, changes) {
    const view = {};
    FIELDS.forEach((name, place) => (view[name] = row[place]));
    view.realHealth = view.health;
    if (this.died.has(view.rank)) view.health = "dead";
    const was = this.ranks.get(view.rank);
    if (!was || was.node !== view.node || was.host !== view.host || was.device !== view.device) changes.placement = true;
    if (!was || was.health !== view.health) changes.health = true;
    this.ranks.set(view.rank, view);
    changes.ranks.add(view.rank);
  }

  #gone(rank, changes) {
    if (this.ranks.delete(rank)) changes.placement = changes.health = true;
    this.strips.delete(rank);
    this.died.delete(rank); // a later rank with this number has not failed
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
    if (gap < -letters.length) return; // known already
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
