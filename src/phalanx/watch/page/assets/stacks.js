// Stacks side by side: ranks that stand at the same place share a column, and whom a verdict names comes first.

import { $, el, into, say } from "./dom.js";
import { ranges } from "./words.js";

export class Stacks {
  #model;
  #source;
  #said = ""; // verdicts that stacks were asked for: once each
  #wanted = false; // by somebody, and not only because of a verdict

  constructor(model, source) {
    this.#model = model;
    this.#source = source;
    $("why").addEventListener("click", () => this.ask(true));
    $("stacks-again").addEventListener("click", () => this.ask(false));
    $("stacks-close").addEventListener("click", () => this.close());
  }

  update(changes) {
    if (!changes.verdicts) return;
    const said = this.#model.verdicts.map((one) => one.text).join("\n");
    if (said && said !== this.#said) this.#ask();
    if (!said && !this.#wanted) this.close();
    this.#said = said;
  }

  close() {
    $("stacks").hidden = true;
    this.#wanted = false;
  }

  ask(scroll) {
    this.#wanted = true;
    this.#ask();
    if (scroll) into($("stacks"));
  }

  async #ask() {
    $("stacks").hidden = false;
    $("stacks").setAttribute("aria-busy", "true");
    say($("stacks-note"), "asks every rank …");
    try {
      this.#show(await this.#source.why());
    } catch (error) {
      $("stacks-list").replaceChildren();
      say($("stacks-note"), `no stacks: ${error.message}`);
    }
    $("stacks").setAttribute("aria-busy", "false");
  }

  #show(because) {
    const named = new Set(this.#model.verdicts.flatMap((one) => one.ranks ?? []));
    const alike = new Map(); // the stack -> ranks
    for (const [rank, stack] of Object.entries(because.stacks ?? {})) {
      // The first line may name the process, which is another in every rank.
      const key = `${named.has(Number(rank))} ${stack.replace(/\b(0x[0-9a-f]+|pid \d+|process \d+|thread \d+)\b/gi, "")}`;
      const group = alike.get(key) ?? { ranks: [], stack };
      group.ranks.push(Number(rank));
      alike.set(key, group);
    }
    const blame = (group) => (group.ranks.some((rank) => named.has(rank)) ? 0 : 1);
    const groups = [...alike.values()].sort((one, other) => blame(one) - blame(other) || one.ranks[0] - other.ranks[0]);
    $("stacks-list").replaceChildren(
      ...groups.map((group) =>
        el(
          "article",
          { class: blame(group) ? "" : "named" },
          el("h3", { text: `${blame(group) ? "" : "■ "}rank ${ranges(group.ranks)}` }),
          el("pre", { text: group.stack.trimEnd() }),
        ),
      ),
      ...(because.report ? [el("article", { class: "report" }, el("h3", { text: "report" }), el("pre", { text: because.report }))] : []),
    );
    const stacks = Object.keys(because.stacks ?? {}).length;
    say($("stacks-note"), stacks ? `${stacks} ${stacks === 1 ? "rank" : "ranks"} at ${groups.length} ${groups.length === 1 ? "place" : "places"}` : "no stacks");
  }
}
