// What a rank has written, as it writes it, as long as somebody looks; and what all have, searched.

import { $, el, into, press, say, sight } from "./dom.js";
import { ranksOf } from "./words.js";

const EVERY = 1000; // milliseconds between two looks
const KEPT = 300_000; // characters that are shown
const BEFORE = 4096; // bytes that are shown before a line that was found
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007]*\u0007|[@-Z\\-_])/g; // of a terminal

export class Logs {
  #model;
  #source;
  #choose;
  #box = $("log");
  #stream = "stdout";
  #rank = null; // whose log is shown
  #end = null; // bytes of it that are shown; null: nothing yet
  #length = 0; // characters
  #followed = true; // until somebody scrolls up
  #busy = false;
  #over = false; // nothing more will come
  #view = 0; // which of all that were opened: what was asked for another one is not shown
  #seen;
  #turn = 0; // a search that is no longer wanted is not shown

  constructor(model, source, choose) {
    this.#model = model;
    this.#source = source;
    this.#choose = choose;
    this.#seen = sight($("logs"), () => this.#look());
    for (const name of ["stdout", "stderr"]) $(name).addEventListener("click", () => this.#open(this.#rank ?? 0, name, null));
    this.#box.addEventListener("scroll", () => {
      const { scrollTop, clientHeight, scrollHeight } = this.#box;
      this.#followed = scrollTop + clientHeight > scrollHeight - 24;
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
      if (this.#model.chosen !== this.#rank) this.#open(this.#model.chosen, this.#stream, null);
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

  #open(rank, stream, at) {
    this.#rank = rank;
    this.#stream = stream;
    this.#view++;
    this.#over = false;
    press($("stdout"), stream === "stdout");
    press($("stderr"), stream === "stderr");
    this.#box.replaceChildren();
    this.#length = 0;
    this.#end = at === null ? null : Math.max(0, at - BEFORE);
    this.#followed = at === null;
    this.#box.setAttribute("aria-label", `${stream} of rank ${rank}`);
    say($("log-note"), `rank ${rank}, ${stream}`);
    this.#look();
  }

  async #look() {
    if (this.#busy || this.#rank === null || !this.#seen.now || document.visibilityState !== "visible") return;
    if (this.#over) return;
    this.#busy = true;
    const [rank, stream, view] = [this.#rank, this.#stream, this.#view];
    let more = false;
    try {
      const part = await this.#source.log(rank, stream, this.#end);
      if (view === this.#view) {
        more = this.#end !== null && part.text.length > 0 && part.end > this.#end;
        this.#add(part);
        this.#end = part.end;
        this.#over = this.#model.ended && !part.text;
        if (!this.#length) say($("log-note"), `rank ${rank}, ${stream}: nothing written yet`);
      } else more = true; // another was chosen meanwhile
    } catch (error) {
      this.#over = this.#model.ended; // and nobody is there to ask
      if (!this.#over || !this.#length) say($("log-note"), `rank ${rank}, ${stream}: ${error.message}`);
    }
    this.#busy = false;
    if (more) this.#look();
  }

  #add(part) {
    if (!part.text) return;
    if (!this.#length) say($("log-note"), `rank ${this.#rank}, ${this.#stream}${part.start > 0 ? " (its end)" : ""}`);
    const text = plain(part.text);
    this.#box.append(el("span", { text }));
    this.#length += text.length;
    while (this.#length > KEPT && this.#box.children.length > 1) {
      this.#length -= this.#box.firstElementChild.textContent.length;
      this.#box.firstElementChild.remove();
    }
    if (this.#followed) this.#box.scrollTop = this.#box.scrollHeight;
  }

  async #search() {
    const turn = ++this.#turn;
    const text = $("search-text").value;
    const list = $("found");
    list.hidden = !text;
    if (!text) return list.replaceChildren();
    const ranks = ranksOf($("search-ranks").value, Math.max(1, this.#model.head?.world_size ?? 0));
    if (ranks === undefined) return list.replaceChildren(el("li", { class: "nothing", text: "ranks are written as 0-3,8" }));
    list.replaceChildren(el("li", { class: "nothing", text: "searches …" }));
    let found;
    try {
      found = await this.#source.search(text, ranks);
    } catch (error) {
      if (turn === this.#turn) list.replaceChildren(el("li", { class: "nothing", text: error.message }));
      return undefined;
    }
    if (turn !== this.#turn) return undefined;
    if (!found.length) return list.replaceChildren(el("li", { class: "nothing", text: `nobody has written "${text}"` }));
    return list.replaceChildren(...found.map((one) => this.#line(one, text)));
  }

  #line(one, text) {
    const line = plain(one.line);
    if (one.rank < 0) return el("li", { class: "nothing", text: line }); // what could not be searched
    const at = line.toLowerCase().indexOf(text.toLowerCase());
    const marked = at < 0 ? [line] : [line.slice(0, at), el("mark", { text: line.slice(at, at + text.length) }), line.slice(at + text.length)];
    const button = el("button", { type: "button" }, el("b", { text: `rank ${one.rank} ${one.stream}` }), el("span", {}, ...marked));
    button.addEventListener("click", () => {
      this.#rank = one.rank; // before it is chosen, which would show the end of it
      this.#choose(one.rank);
      this.#open(one.rank, one.stream, one.at);
    });
    return el("li", {}, button);
  }
}

// Without colours, and of a line that was written over only what was left of it.
function plain(text) {
  const without = text.replace(ESCAPES, "").replaceAll("\r\n", "\n");
  return without.includes("\r") ? without.replace(/[^\n\r]*\r(?=[^\n])/g, "") : without;
}
