// What ran: hyperparameters, commit, versions, machine.

import { $, el, say } from "../common/dom.js";
import { bytes } from "../common/format.js";

export class About {
  #model;

  constructor(model) {
    this.#model = model;
  }

  update(changes) {
    if (!changes.metadata && !changes.whole) return;
    const { metadata } = this.#model;
    $("about").hidden = !metadata;
    if (!metadata) return;
    say($("about-line"), brief(metadata));
    $("about-facts").replaceChildren(...groups(metadata).flatMap(([title, facts]) => (facts.length ? [group(title, facts)] : [])));
  }
}

function group(title, facts) {
  return el("section", {}, el("h3", { text: title }), el("dl", {}, ...facts.flatMap(([name, text]) => [el("dt", { text: name }), el("dd", { text })])));
}

export function groups(metadata) {
  const { git, machine, versions } = metadata;
  const gpus = new Map();
  for (const gpu of machine?.gpus ?? []) {
    const name = gpu.memory ? `${gpu.name}, ${bytes(gpu.memory)}` : gpu.name;
    gpus.set(name, (gpus.get(name) ?? 0) + 1);
  }
  const code = [
    ["script", metadata.script],
    ["arguments", (metadata.arguments ?? []).join(" ")],
    ["folder", metadata.cwd],
    ["commit", git ? git.commit || "no commit yet" : ""],
    ["branch", git?.branch],
    ["changes", git ? (git.dirty ? "uncommitted changes" : "none") : ""],
  ];
  const host = [
    ["host", machine?.host],
    ["system", machine?.system],
    ["CPU", machine?.cpu ? `${machine.cpus} × ${machine.cpu}` : machine?.cpus ? String(machine.cpus) : ""],
    ["memory", machine?.memory ? bytes(machine.memory) : ""],
    ["GPUs", [...gpus].map(([name, many]) => `${many} × ${name}`).join("; ")],
    ["driver", machine?.driver],
  ];
  const known = (facts) => facts.filter(([, text]) => text);
  return [
    ["Hyperparameters", parameters(metadata)],
    ["Code", known(code)],
    ["Versions", Object.entries(versions ?? {})],
    ["Machine", known(host)],
    ["Notes", (metadata.notes ?? []).map((note) => ["", note])],
  ];
}

export const parameters = (metadata) => Object.entries(metadata?.hyperparameters ?? {}).map(([name, value]) => [name, value === null ? "none" : String(value)]);

// 3f2a91c, with a star if there are uncommitted changes.
export const commitOf = (metadata) => (metadata?.git?.commit ? metadata.git.commit.slice(0, 7) + (metadata.git.dirty ? "*" : "") : "");

function brief(metadata) {
  const shown = parameters(metadata).slice(0, 8).map(([name, text]) => `${name} ${text.length > 24 ? `${text.slice(0, 23)}…` : text}`);
  const commit = commitOf(metadata);
  const torch = metadata.versions?.torch;
  return [...shown, ...(commit ? [`commit ${commit}`] : []), ...(torch ? [`torch ${torch}`] : [])].join(" · ") || metadata.script;
}
