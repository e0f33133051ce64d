// The phases of every rank on one time axis: who waits, and for whom. Only the visible part is drawn.

import { FONT, fit, hatched, timeStep } from "../common/canvas.js";
import { $, el, press, say, observeVisible } from "../common/dom.js";
import { TICK } from "../model.js";
import { PHASES, SLEEPING, UNSEEN, WAITING } from "../phases.js";
import { colour, onTheme } from "../common/theme.js";
import { clock, offset, percent, ranges } from "../common/format.js";

const TOP = 34; // height of the axis with its symbols
const STRAGGLERS = 18; // height of the lane of ranks that others wait for
const KEPT = 20000; // cached ticks
const MARKS = { fault: "dead", recovered: "healthy", restarted: "healthy", stalled: "stuck", verdict: "stuck", resumed: "healthy", preempted: "slow" };
const SIGNS = { fault: "✕", recovered: "✓", restarted: "↻", stalled: "■", verdict: "!", resumed: "▸", preempted: "◇" };

export class Timeline {
  #model;
  #choose;
  #scroller = $("lanes");
  #canvas = this.#scroller.querySelector("canvas");
  #space = el("div", { class: "space" });
  #span = 30; // visible seconds
  #end = null; // null: the newest
  #asked = false;
  #seen;
  #hover = null; // {x, y}
  #cache = new Map(); // tick -> ranks that others wait for, once all samples are there
  #hatch = null;

  constructor(model, choose) {
    this.#model = model;
    this.#choose = choose;
    this.#scroller.append(this.#space);
    const letters = ["d", "f", "b", "o", "w", "k", "c", "i", "n", "s"];
    $("legend").append(
      ...letters.map((letter) =>
        el("li", {}, el("i", { class: `phase-${PHASES[letter]}`, "aria-hidden": "true" }), PHASES[letter]),
      ),
    );
    this.#seen = observeVisible(this.#scroller, () => this.#ask());
    this.#scroller.addEventListener("scroll", () => this.#ask(), { passive: true });
    new ResizeObserver(() => this.#ask()).observe(this.#scroller);
    onTheme(() => {
      this.#hatch = null;
      this.#ask();
    });
    this.#pointer();
    $("zoom-in").addEventListener("click", () => this.zoom(1 / 2));
    $("zoom-out").addEventListener("click", () => this.zoom(2));
    $("now").addEventListener("click", () => this.live());
  }

  update(changes) {
    if (changes.whole) this.#cache.clear();
    if (changes.strips || changes.placement || changes.events || changes.chosen || changes.health) {
      if (changes.chosen) this.#reveal();
      if (this.#seen.now) this.#draw(); // in this frame, not in the next
    }
  }

  zoom(factor, at = 1) {
    const [start, end] = this.#window();
    const most = Math.max(10, this.#model.newest - this.#model.oldest);
    const span = Math.min(Math.max(2, this.#span * factor), most);
    const pivot = start + (end - start) * at;
    if (this.#end !== null) this.#end = pivot + (1 - at) * span;
    this.#span = span;
    this.#ask();
  }

  pan(share) {
    this.#move(share * 0.25 * this.#span);
  }

  live() {
    this.#end = null;
    this.#ask();
  }

  #move(seconds) {
    const newest = this.#model.newest;
    const first = Math.min(newest, this.#model.oldest + this.#span);
    const end = Math.max(first, (this.#end ?? newest) + seconds); // not before the first sample
    this.#end = end >= newest ? null : end;
    this.#ask();
  }

  #window() {
    // A short history grows from the left; a long one scrolls.
    const end = this.#end ?? Math.max(this.#model.newest, this.#model.oldest + this.#span);
    return [end - this.#span, end];
  }

  #ask() {
    if (this.#asked) return;
    this.#asked = true;
    requestAnimationFrame(() => {
      this.#asked = false;
      if (this.#seen.now) this.#draw();
    });
  }

  // -- layout

  get #lane() {
    const lanes = Math.max(1, this.#model.order.length);
    return Math.max(14, Math.min(26, Math.floor(240 / lanes)));
  }

  get #gutter() {
    return 20 + 7 * String(this.#model.order.at(-1) ?? 0).length;
  }

  #at(x, y) {
    const [start, end] = this.#window();
    const width = this.#scroller.clientWidth - this.#gutter;
    const time = start + ((x - this.#gutter) / width) * (end - start);
    const place = Math.floor((y - TOP - STRAGGLERS + this.#scroller.scrollTop) / this.#lane);
    const rank = y > TOP + STRAGGLERS ? this.#model.order[place] : undefined;
    return { time, tick: Math.floor(time / TICK), rank };
  }

  #reveal() {
    const place = this.#model.order.indexOf(this.#model.chosen);
    if (place < 0) return;
    const [top, room] = [place * this.#lane, this.#scroller.clientHeight - TOP - STRAGGLERS];
    if (top < this.#scroller.scrollTop) this.#scroller.scrollTop = top;
    else if (top + this.#lane > this.#scroller.scrollTop + room) this.#scroller.scrollTop = top + this.#lane - room;
  }

  // -- who waits for whom

  #waitedFor(tick) {
    const kept = this.#cache.get(tick);
    if (kept) return kept;
    const working = [];
    let waiting = 0;
    for (const [rank, strip] of this.#model.strips) {
      const letter = strip.letters[tick - strip.start];
      if (letter === undefined || letter === UNSEEN) continue;
      if (letter === "w" || letter === "W") waiting++;
      else working.push(rank);
    }
    // As in watch/model/waiting.py: when at least half of the ranks wait, they wait for the others.
    const found = working.length <= waiting ? working : [];
    if (this.#cache.size > KEPT) this.#cache.clear();
    if (tick < this.#model.newest / TICK - 30) this.#cache.set(tick, found);
    return found;
  }

  // -- drawing

  #draw() {
    const { order, strips } = this.#model;
    if (!this.#model.head) return;
    const lane = this.#lane;
    const tall = TOP + STRAGGLERS + order.length * lane + 4;
    const [width, height] = [this.#scroller.clientWidth, Math.min(tall, this.#scroller.clientHeight || tall)];
    if (width < 40) return;
    this.#space.style.height = `${Math.max(0, tall - height)}px`;
    this.#scroller.style.setProperty("--lanes", `${tall}px`);
    const pen = fit(this.#canvas, width, Math.max(height, TOP + STRAGGLERS));
    pen.font = FONT;
    pen.textBaseline = "middle";
    const [start, end] = this.#window();
    const gutter = this.#gutter;
    const scale = (width - gutter) / (end - start);
    const x = (time) => gutter + (time - start) * scale;
    const top = this.#scroller.scrollTop;

    const first = Math.floor(top / lane);
    const last = Math.min(order.length - 1, Math.floor((top + height - TOP - STRAGGLERS) / lane));
    for (let place = first; place <= last; place++) {
      const y = TOP + STRAGGLERS + place * lane - top;
      this.#label(pen, order[place], y, lane, gutter);
      const strip = strips.get(order[place]);
      if (strip) this.#strip(pen, strip, { x, start, end, y: y + 1, height: lane - 2, scale });
    }
    pen.clearRect(0, 0, width, TOP + STRAGGLERS); // what has been scrolled under the axis
    this.#axis(pen, { x, start, end, width, height, gutter });
    this.#stragglersLane(pen, { x, start, end, scale, gutter });
    this.#events(pen, { x, start, end, height });
    this.#pointed(pen, { x, height, lane, top });
    press($("now"), this.#end === null);
    this.#describe();
    this.#sum();
  }

  #label(pen, rank, y, lane, gutter) {
    const chosen = rank === this.#model.chosen;
    const health = this.#model.ranks.get(rank)?.health;
    if (chosen) {
      pen.fillStyle = colour("chosen");
      pen.fillRect(0, y, gutter - 4, lane);
    }
    const unhealthy = health === "dead" || health === "stuck" || health === "slow" || health === "silent";
    pen.fillStyle = colour(unhealthy ? health : chosen ? "ink" : "soft");
    pen.textAlign = "right";
    pen.fillText(String(rank), gutter - 8, y + lane / 2 + 0.5);
    if (unhealthy) {
      pen.textAlign = "left";
      pen.fillText({ dead: "✕", stuck: "■", slow: "▾", silent: "○" }[health], 1, y + lane / 2 + 0.5);
    }
  }

  #strip(pen, strip, { x, start, end, y, height, scale }) {
    const first = Math.max(0, Math.floor(start / TICK) - strip.start);
    const last = Math.min(strip.letters.length, Math.ceil(end / TICK) - strip.start);
    // A letter may be less than a pixel wide: then one of several is shown.
    const every = Math.max(1, Math.floor(1 / (scale * TICK)));
    const left = x(start);
    const time = (place) => (strip.start + place) * TICK;
    for (let place = first; place < last; ) {
      const letter = strip.letters[place].toLowerCase();
      let next = place + every;
      while (next < last && strip.letters[next].toLowerCase() === letter) next += every;
      if (letter !== UNSEEN) {
        const from = Math.max(left, x(time(place)));
        const to = x(time(Math.min(next, last)));
        if (letter === WAITING) {
          // Waiting is drawn lower and hatched.
          pen.fillStyle = this.#hatch ??= hatched(pen, colour("phase-collective"), colour("hatch"));
          pen.fillRect(from, y + height * 0.2, to - from, height * 0.6);
        } else if (letter === SLEEPING) {
          // Nothing is done: only a thin line.
          pen.fillStyle = colour("phase-sleep");
          pen.fillRect(from, y + height * 0.4, to - from, height * 0.2);
        } else {
          pen.fillStyle = colour(`phase-${PHASES[letter] ?? "idle"}`);
          pen.fillRect(from, y, to - from, height);
        }
      }
      place = next;
    }
    if (scale * TICK < 3) return;
    pen.fillStyle = colour("panel"); // ends of steps, where there is room for them
    for (let place = first; place < last; place++) {
      const letter = strip.letters[place];
      if (letter !== UNSEEN && letter !== letter.toLowerCase()) pen.fillRect(x(time(place + 1)) - 1, y, 1.5, height);
    }
  }

  #axis(pen, { x, start, end, width, height, gutter }) {
    const since = this.#model.head.started;
    const step = timeStep(end - start, width - gutter);
    pen.textAlign = "center";
    for (let number = Math.ceil((start - since) / step); since + number * step <= end; number++) {
      const at = x(since + number * step);
      pen.fillStyle = colour("line");
      pen.fillRect(at, 15, 1, TOP - 15);
      pen.globalAlpha = 0.5;
      pen.fillRect(at, TOP, 1, height - TOP);
      pen.globalAlpha = 1;
      pen.fillStyle = colour("soft");
      const text = offset(number * step, step < 1 ? 1 : 0);
      if (at > gutter + 14 && at < width - 16) pen.fillText(text, at, 8);
    }
  }

  #stragglersLane(pen, { x, start, end, scale, gutter }) {
    const every = Math.max(1, Math.floor(2 / (scale * TICK)));
    const first = Math.ceil(Math.max(start, this.#model.oldest) / TICK / every) * every;
    const last = Math.floor(Math.min(end, this.#model.newest) / TICK);
    pen.textAlign = "left";
    for (let tick = first; tick < last; ) {
      const ranks = this.#waitedFor(tick);
      const same = ranks.join();
      let next = tick + every;
      while (next < last && this.#waitedFor(next).join() === same) next += every;
      if (ranks.length) {
        const [from, to] = [Math.max(gutter, x(tick * TICK)), x(Math.min(next, last) * TICK)];
        pen.fillStyle = colour("slow");
        pen.fillRect(from, TOP + STRAGGLERS - 5, to - from, 3);
        const text = ranks.length > 3 ? `${ranks.length} ranks` : ranges(ranks);
        if (pen.measureText(text).width + 4 < to - from) pen.fillText(text, from + 1, TOP + STRAGGLERS - 11);
      }
      tick = next;
    }
  }

  #events(pen, { x, start, end, height }) {
    pen.textAlign = "center";
    let room = 0; // x of the next symbol: a recovery often follows its fault closely
    for (const one of this.#model.events) {
      if (!MARKS[one.kind] || one.time < start || one.time > end) continue;
      const at = Math.round(x(one.time)); // whole pixels are sharp
      pen.fillStyle = colour(MARKS[one.kind]);
      pen.fillRect(at, TOP, 1, height - TOP);
      room = Math.max(room + 10, at);
      pen.fillText(SIGNS[one.kind], room, TOP - 7);
    }
  }

  #pointed(pen, { x, height, lane, top }) {
    if (!this.#hover) return;
    const { tick, rank } = this.#at(this.#hover.x, this.#hover.y);
    pen.fillStyle = colour("accent");
    pen.fillRect(this.#hover.x, TOP, 1, height - TOP);
    // From the waiting rank to the one that it waits for.
    if (rank === undefined || this.#model.letter(rank, tick).toLowerCase() !== WAITING) return;
    const middle = (one) => TOP + STRAGGLERS + (this.#model.order.indexOf(one) + 0.5) * lane - top;
    pen.strokeStyle = colour("accent");
    pen.lineWidth = 1.5;
    const at = x((tick + 0.5) * TICK);
    for (const other of this.#waitedFor(tick).slice(0, 4)) {
      const [from, to] = [middle(rank), Math.max(TOP + STRAGGLERS, middle(other))];
      pen.beginPath();
      pen.moveTo(at, from);
      pen.bezierCurveTo(at + 24, from, at + 24, to, at, to);
      pen.stroke();
      pen.beginPath();
      pen.arc(at, to, 3, 0, 7);
      pen.fill();
    }
  }

  // What is under the pointer; without a pointer, the chosen rank at the right edge.
  #describe() {
    const tip = $("tip");
    const box = this.#scroller.getBoundingClientRect();
    const right = this.#end ?? this.#model.newest;
    const { rank, tick, time } = this.#hover
      ? this.#at(this.#hover.x, this.#hover.y)
      : { rank: this.#model.chosen, tick: Math.floor(right / TICK) - 1, time: right };
    const text = this.#reading(rank, tick, time);
    say($("reading"), text);
    tip.hidden = !this.#hover || rank === undefined;
    if (tip.hidden) return;
    say(tip, text);
    const left = Math.min(box.left + this.#hover.x + 14, innerWidth - tip.offsetWidth - 8);
    const above = box.top + this.#hover.y - tip.offsetHeight - 12;
    tip.style.transform = `translate(${Math.max(4, left)}px, ${above}px)`;
  }

  // The worst straggler of the last minute, if it matters.
  #sum() {
    const [rank, share, phase] = this.#model.stragglers[0] ?? [0, 0, ""];
    say($("stragglers"), share >= 0.03 ? `rank ${rank} kept the others waiting ${percent(share)} of the last minute, in ${phase}` : "");
  }

  #reading(rank, tick, time) {
    if (rank === undefined || !this.#model.ranks.has(rank)) return "";
    const letter = this.#model.letter(rank, tick).toLowerCase();
    const when = `${offset(time - this.#model.head.started, 1)} (${clock(time)})`;
    if (letter === UNSEEN) return `rank ${rank} · not sampled · ${when}`;
    const others = letter === WAITING ? this.#waitedFor(tick) : [];
    const first = others.length ? this.#model.letter(others[0], tick).toLowerCase() : "";
    const whom = others.length ? ` · waits for rank ${ranges(others)} (${PHASES[first] ?? "?"})` : "";
    return `rank ${rank} · ${PHASES[letter] ?? letter}${whom} · ${when}`;
  }

  // -- pointer

  #pointer() {
    let dragged = null;
    const here = (event) => {
      const box = this.#scroller.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    this.#scroller.addEventListener("pointerdown", (event) => {
      dragged = { x: event.clientX, far: false };
    });
    this.#scroller.addEventListener("pointermove", (event) => {
      this.#hover = here(event);
      if (dragged && event.buttons) {
        const by = event.clientX - dragged.x;
        if (dragged.far || Math.abs(by) > 4) {
          dragged = { x: event.clientX, far: true };
          this.#move((-by * this.#span) / (this.#scroller.clientWidth - this.#gutter));
        }
      }
      this.#ask();
    });
    this.#scroller.addEventListener("pointerup", (event) => {
      const { rank } = this.#at(here(event).x, here(event).y);
      if (dragged && !dragged.far && rank !== undefined) this.#choose(rank);
      dragged = null;
    });
    for (const name of ["pointerleave", "pointercancel"]) {
      this.#scroller.addEventListener(name, () => {
        dragged = this.#hover = null;
        this.#ask();
      });
    }
    this.#scroller.addEventListener(
      "wheel",
      (event) => {
        const { x } = here(event);
        const share = (x - this.#gutter) / (this.#scroller.clientWidth - this.#gutter);
        if (event.ctrlKey) this.zoom(event.deltaY > 0 ? 1.25 : 0.8, share);
        else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
          this.#move(((event.deltaX || event.deltaY) * this.#span) / this.#scroller.clientWidth);
        } else return; // native scrolling
        event.preventDefault();
      },
      { passive: false },
    );
  }
}
