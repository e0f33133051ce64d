// Where ranks run, and the speed of the links between nodes, as `phalanx doctor` measured it.

import { $, drawn, el, say } from "../common/dom.js";
import { bandwidth, clock, HEALTH } from "../common/format.js";

const RING = 16; // with more hosts: only the list
const SLOW = 0.5; // of the median

export class Topology {
  #model;
  #cells = new Map(); // rank -> element

  constructor(model, choose) {
    this.#model = model;
    $("nodes").addEventListener("click", (event) => {
      const cell = event.target.closest("[data-rank]");
      if (cell) choose(Number(cell.dataset.rank));
    });
  }

  update(changes) {
    if (changes.placement) this.#nodes();
    if (changes.health || changes.chosen) this.#paint();
    if (changes.links) this.#links();
  }

  #nodes() {
    const nodes = new Map();
    for (const rank of this.#model.order) {
      const view = this.#model.ranks.get(rank);
      const key = `${view.node} ${view.host}`;
      if (!nodes.has(key)) nodes.set(key, []);
      nodes.get(key).push(view);
    }
    this.#cells.clear();
    $("nodes").replaceChildren(
      ...[...nodes.values()].map((views) => {
        const cells = views.map((view) => {
          const cell = el("span", { class: "rank-cell", "data-rank": view.rank, title: `rank ${view.rank} · ${view.device || "CPU"}` });
          this.#cells.set(view.rank, cell);
          return cell;
        });
        const name = views[0].host || `node ${views[0].node}`;
        return el("article", { class: "node" }, el("h3", { text: name, title: name }), el("div", { class: "rank-cells" }, ...cells));
      }),
    );
    this.#paint();
  }

  #paint() {
    for (const [rank, cell] of this.#cells) {
      const view = this.#model.ranks.get(rank);
      if (!view) continue;
      const [word, sign] = HEALTH[view.health] ?? [view.health, "?"];
      if (cell.dataset.health !== view.health) cell.dataset.health = view.health;
      const plain = view.health === "healthy" || view.health === "waiting" || view.health === "stopped" || view.health === "done";
      say(cell, plain ? String(rank) : `${rank}${sign}`);
      const label = `rank ${rank} on ${view.device || "a CPU"}: ${word}`;
      if (cell.title !== label) cell.title = label;
      cell.classList.toggle("chosen", rank === this.#model.chosen);
    }
  }

  #links() {
    const { links, measured } = this.#model;
    const box = $("links");
    if (!links.length) {
      box.replaceChildren();
      say($("links-note"), "");
      return;
    }
    const speeds = links.flatMap(([, , , there, back]) => [there, back]).sort((one, other) => one - other);
    const median = speeds[speeds.length >> 1];
    const slow = ([, , , there, back]) => Math.min(there, back) < SLOW * median;
    const when = measured ? ` · measured ${new Date(measured * 1000).toISOString().slice(0, 10)} ${clock(measured)}` : "";
    say($("links-note"), `median ${bandwidth(median)}${when}`);
    const hosts = [...new Set(links.flatMap(([one, other]) => [one, other]))];
    const worst = [...links].sort((one, other) => Math.min(one[3], one[4]) - Math.min(other[3], other[4]));
    box.replaceChildren(
      ...(hosts.length <= RING && hosts.length > 1 ? [ring(hosts, links, slow, median)] : []),
      el(
        "ul",
        { class: "pairs" },
        ...worst.slice(0, 6).map((link) => {
          const [one, other, latency, there, back] = link;
          const speed = there === back ? bandwidth(there) : `${bandwidth(there)} there, ${bandwidth(back)} back`;
          const text = `${one} ↔ ${other}: ${speed}, ${(latency * 1e6).toFixed(0)} µs`;
          return el("li", { class: slow(link) ? "slow" : "" }, slow(link) ? el("b", { text: "▾ slow " }) : "", text);
        }),
        ...(worst.length > 6 ? [el("li", { class: "rest", text: `and ${worst.length - 6} more links` })] : []),
      ),
    );
  }
}

function ring(hosts, links, slow, median) {
  const [middle, radius] = [120, 84];
  const place = (host) => {
    const angle = (2 * Math.PI * hosts.indexOf(host)) / hosts.length - Math.PI / 2;
    return [middle + radius * Math.cos(angle), middle + radius * Math.sin(angle)];
  };
  const lines = [...links]
    .sort((one, other) => slow(one) - slow(other)) // the slow ones on top
    .map((link) => {
      const [[x1, y1], [x2, y2]] = [place(link[0]), place(link[1])];
      const width = 0.75 + 1.5 * Math.min(1, Math.min(link[3], link[4]) / median);
      const title = drawn("title", { text: `${link[0]} ↔ ${link[1]}: ${bandwidth(link[3])} there, ${bandwidth(link[4])} back` });
      return drawn("line", { x1, y1, x2, y2, "stroke-width": slow(link) ? 1.75 : width, class: slow(link) ? "slow" : "" }, title);
    });
  const names = hosts.flatMap((host) => {
    const [x, y] = place(host);
    const [dx, dy] = [(x - middle) / radius, (y - middle) / radius];
    const anchor = dx > 0.3 ? "start" : dx < -0.3 ? "end" : "middle";
    const short = host.length > 12 ? `${host.slice(0, 11)}…` : host;
    return [
      drawn("circle", { cx: x, cy: y, r: 4.5 }),
      drawn("text", { x: x + dx * 11, y: y + dy * 13 + 3.5, "text-anchor": anchor, text: short }),
    ];
  });
  const label = `links between ${hosts.length} nodes, ${links.filter(slow).length} of them slow`;
  return drawn("svg", { viewBox: "-40 0 320 240", class: "ring", role: "img", "aria-label": label }, ...lines, ...names);
}
