// The output of a rank, followed while it is visible, and the search in the output of all ranks.

import { $, el, into, press, say, observeVisible } from "../common/dom.js";
import { ranksOf } from "../common/format.js";
import { explained } from "../live.js";

const EVERY = 1000; // milliseconds between two requests
const KEPT = 300_000; // characters
const BEFORE = 4096; // bytes shown before a found line
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])/g; // terminal escape sequences

export class Logs {
  #model;
  #source;
  #choose;
  #box = $("log");
  #stream = "stdout";
  #rank = null; // whose log is shown
  #end = null; // offset after the shown part; null: nothing yet
  #length = 0; // characters
  #followed = true; // until the user scrolls up
  #found = null; // the found line that is shown
  #busy = false;
  #over = false; // no more output
  #lost = false; // the last request has failed, and the note says so
  #view = 0; // number of the opened log: answers for another one are dropped
  #seen;
  #turn = 0; // number of the search: results of an older one are dropped

  constructor(model, source, choose) {
    this.#model = model;
    this.#source = source;
    this.#choose = choose;
    this.#seen = observeVisible($("logs"), () => this.#look());
    for (const name of ["stdout", "stderr"]) $(name).addEventListener("click", () => this.#open(this.#rank ?? 0, name));
    this.#box.addEventListener("scroll", () => {
      const { scrollTop, clientHeight, scrollHeight } = this.#box;
      this.#followed = scrollTop + clientHeight > scrollHeight - 24;
      if (this.#found && this.#followed) this.#look();
    }, { passive: true });
    $("search").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#search();
    });
    $("search-text").addEventListener("input", () => {
      if (!$("search-text").value) this.#search();
    });
    setInterval(() => this.#look(), EVERY);
  }

  update(changes) {
    if ((changes.chosen || this.#rank === null) && this.#model.ranks.size) {
      if (this.#model.chosen !== this.#rank) this.#open(this.#model.chosen, this.#stream);
    }
  }

  show() {
    into($("logs"));
    this.#box.focus({ preventScroll: true });
  }

  find() {
    into($("logs"));
    $("search-text").focus({ preventScroll: true });
    $("search-text").select();
  }

  #open(rank, stream, found = null) {
    this.#rank = rank;
    this.#stream = stream;
    this.#view++;
    this.#over = false;
    press($("stdout"), stream === "stdout");
    press($("stderr"), stream === "stderr");
    this.#box.replaceChildren();
    this.#length = 0;
    this.#found = found;
    this.#end = found && Math.max(0, found.at - BEFORE);
    this.#followed = !found;
    this.#box.setAttribute("aria-label", `${stream} of rank ${rank}`);
    say($("log-note"), `rank ${rank}, ${stream}`);
    this.#look();
  }

  async #look() {
    if (this.#busy || this.#rank === null || !this.#seen.now || document.visibilityState !== "visible") return;
    if (this.#over || (this.#found && this.#length && !this.#followed)) return;
    this.#busy = true;
    const [rank, stream, view] = [this.#rank, this.#stream, this.#view];
    let more = false;
    try {
      const part = await this.#source.log(rank, stream, this.#end);
      if (view === this.#view) {
        more = this.#end !== null && !this.#found && part.text.length > 0 && part.end > this.#end;
        this.#add(part);
        if (this.#found && this.#length && !part.text) this.#found = null; // the end is reached: follow from here on
        this.#end = part.end;
        this.#over = this.#model.ended && !part.text;
        if (!this.#length) say($("log-note"), `rank ${rank}, ${stream}: nothing written yet`);
      } else more = true; // another log was opened meanwhile
      if (this.#lost) say($("log-note"), `rank ${this.#rank}, ${this.#stream}`);
      this.#lost = false;
    } catch (error) {
      if (view === this.#view) {
        this.#over = this.#model.ended; // the server is gone
        this.#lost = !this.#over;
        const shown = this.#over && this.#length; // the end may be missing, but not much
        const why = explained(error, this.#model, `phalanx logs ${this.#model.head?.run} -r ${rank} --stream ${stream}`);
        say($("log-note"), `rank ${rank}, ${stream}${shown ? "" : `: ${why}`}`);
      } else more = true;
    }
    this.#busy = false;
    if (more) this.#look();
  }

  #add(part) {
    if (!part.text) return;
    if (!this.#length) say($("log-note"), `rank ${this.#rank}, ${this.#stream}${part.start > 0 ? " (its end)" : ""}`);
    const first = !this.#length;
    const text = plain(part.text);
    if (first && this.#found) this.#point(part);
    else this.#box.append(el("span", { text }));
    this.#length += text.length;
    while (this.#length > KEPT && this.#box.children.length > 1) {
      this.#length -= this.#box.firstElementChild.textContent.length;
      this.#box.firstElementChild.remove();
    }
    if (this.#found) this.#followed = false;
    else if (this.#followed) this.#box.scrollTop = this.#box.scrollHeight;
  }

  // Show the found line in the middle.
  #point(part) {
    const { at, line } = this.#found;
    const place = part.text.lastIndexOf(line, at - part.start);
    const [before, after] = place < 0 ? [part.text, ""] : [part.text.slice(0, place), part.text.slice(place + line.length)];
    const mark = el("mark", { text: place < 0 ? "" : plain(line) });
    this.#box.append(el("span", {}, plain(before), mark, plain(after)));
    if (place >= 0) this.#box.scrollTop = mark.offsetTop - this.#box.offsetTop - this.#box.clientHeight / 2;
  }

  async #search() {
    const turn = ++this.#turn;
    const text = $("search-text").value;
    const list = $("found");
    list.hidden = !text;
    if (!text) return list.replaceChildren();
    const ranks = ranksOf($("search-ranks").value, Math.max(1, this.#model.head?.world_size ?? 0));
    if (ranks === undefined) return list.replaceChildren(el("li", { class: "nothing", text: "expected ranks such as 0-3,8" }));
    list.replaceChildren(el("li", { class: "nothing", text: "searching …" }));
    let found;
    try {
      found = await this.#source.search(text, ranks);
    } catch (error) {
      const why = explained(error, this.#model, `phalanx logs ${this.#model.head?.run}`);
      if (turn === this.#turn) list.replaceChildren(el("li", { class: "nothing", text: why }));
      return undefined;
    }
    if (turn !== this.#turn) return undefined;
    if (!found.length) return list.replaceChildren(el("li", { class: "nothing", text: `no matches for "${text}"` }));
    return list.replaceChildren(...found.map((one) => this.#line(one, text)));
  }

  #line(one, text) {
    const line = plain(one.line);
    if (one.rank < 0) return el("li", { class: "nothing", text: line }); // output that could not be searched
    const at = line.toLowerCase().indexOf(text.toLowerCase());
    const marked = at < 0 ? [line] : [line.slice(0, at), el("mark", { text: line.slice(at, at + text.length) }), line.slice(at + text.length)];
    const button = el("button", { type: "button" }, el("b", { text: `rank ${one.rank} ${one.stream}` }), el("span", {}, ...marked));
    button.addEventListener("click", () => {
      this.#rank = one.rank; // before it is chosen, which would open its end
      this.#choose(one.rank);
      this.#open(one.rank, one.stream, one);
    });
    return el("li", {}, button);
  }
}

// Without colours and overwritten parts of lines.
function plain(text) {
  const without = text.replace(ESCAPES, "").replaceAll("\r\n", "\n");
  return without.includes("\r") ? without.replace(/[^\n\r]*\r(?=[^\n])/g, "") : without;
}
