// Where the run comes from: the server, as it happens; or, in a report, this very file.

const PAUSES = [0.5, 1, 2, 3, 5]; // seconds between two tries
const SILENCE = 40; // seconds: the server says something every ten, so nobody is there any more

// The data of a report: {whole: Update, logs: {rank: {stdout, stderr}}, why: Because}.
export function kept() {
  const script = document.querySelector("script#run");
  return script ? new Kept(parsed(script.textContent)) : null;
}

export class Remote {
  report = false;
  #key = "";
  #folder = remembered(); // where the cookie is valid

  // Turns the key of the link into a cookie, and takes it out of the address bar: a picture of the screen, or the
  // history of the browser, gives nobody the run.
  async enter() {
    const told = location.hash.slice(1);
    if (told) {
      this.#key = told; // until it has got there: the first try may fail
      history.replaceState(null, "", location.pathname + location.search);
    }
    if (!this.#key) return;
    const answer = await fetch("enter", { method: "POST", body: this.#key, credentials: "same-origin", cache: "no-store" });
    this.#key = "";
    if (!answer.ok) return;
    this.#folder = answer.headers.get("Content-Location") ?? "";
    remember(this.#folder);
  }

  // Calls update(update, whole) for everything that happens, and status("open" | "lost" | "quiet" | "denied" | "ended").
  // `over` says whether the run has ended: then there is nothing to come back for. Quiet: the server has nothing more to
  // say, and no end was seen; whoever looked at the run was ended, or the run was killed.
  async follow(update, status, over) {
    let entered = false;
    let quiet = false;
    for (let tries = 0; ; tries++) {
      let heard = false;
      let last = false;
      try {
        if (!entered) await this.enter();
        entered = true;
        const answer = await fetch(`${this.#folder}live`, { credentials: "same-origin", cache: "no-store" });
        if (answer.status === 401 || answer.status === 403) return status("denied");
        if (!answer.ok) throw new Error(`the server says ${answer.status}`);
        for await (const [kind, data] of messages(answer.body)) {
          last = kind === "end";
          if (last) break;
          if (kind === "update") quiet = false;
          if (!quiet) status("open");
          heard = true;
          update(parsed(data), kind === "whole");
        }
      } catch (error) {
        if (!(error instanceof TypeError)) console.warn(String(error)); // no TypeError: that is a lost connection
      }
      if (over()) return status("ended");
      if (heard) tries = 0;
      quiet = last;
      status(last ? "quiet" : "lost");
      await pause(last ? PAUSES.at(-1) : PAUSES[Math.min(tries, PAUSES.length - 1)]);
    }
  }

  log(rank, stream, start) {
    const query = new URLSearchParams({ rank, stream });
    if (start !== null) query.set("start", start);
    return this.#json(`log?${query}`);
  }

  search(text, ranks) {
    const query = new URLSearchParams({ text });
    if (ranks) query.set("ranks", ranks.join(","));
    return this.#json(`search?${query}`);
  }

  why() {
    return this.#json("why");
  }

  async #json(path) {
    const answer = await fetch(this.#folder + path, { credentials: "same-origin", cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()) || `the server says ${answer.status}`);
    return parsed(await answer.text());
  }
}

// Other tabs, and this one when it is loaded again, have no key. What is kept here no other port can read.
function remember(folder) {
  try {
    localStorage.setItem("phalanx-folder", folder);
  } catch {}
}

function remembered() {
  try {
    return localStorage.getItem("phalanx-folder") ?? "";
  } catch {
    return "";
  }
}

class Kept {
  report = true;
  #run;

  constructor(run) {
    this.#run = run;
  }

  async follow(update, status) {
    update(this.#run.whole, true);
    status("ended");
  }

  async log(rank, stream, start) {
    const text = this.#run.logs?.[rank]?.[stream] ?? "";
    const from = Math.min(start ?? 0, text.length);
    return { start: from, end: text.length, text: text.slice(from) };
  }

  async search(text, ranks) {
    const found = [];
    for (const [rank, streams] of Object.entries(this.#run.logs ?? {})) {
      if (ranks && !ranks.includes(Number(rank))) continue;
      for (const [stream, all] of Object.entries(streams)) {
        let at = 0;
        for (const line of all.split("\n")) {
          if (line.toLowerCase().includes(text.toLowerCase())) found.push({ rank: Number(rank), stream, at, line });
          if (found.length >= 200) return found;
          at += line.length + 1;
        }
      }
    }
    return found;
  }

  async why() {
    return this.#run.why ?? { report: "", verdicts: [], stacks: {} };
  }
}

// Without what turns the direction of writing: a name that has it would make the words beside it read otherwise.
function parsed(text) {
  return JSON.parse(text.replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd"));
}

// Server-sent events, by fetch and not by EventSource: that one does not say why it was refused.
async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const hangUp = () => reader.cancel().catch(() => {});
  let text = "";
  try {
    for (;;) {
      const silent = setTimeout(hangUp, SILENCE * 1000);
      const { value, done } = await reader.read();
      clearTimeout(silent);
      if (done) return;
      let from = Math.max(0, text.length - 1);
      text += value;
      for (let end; (end = text.indexOf("\n\n", from)) >= 0; from = 0) {
        const message = text.slice(0, end);
        text = text.slice(end + 2);
        let kind = "message";
        const data = [];
        for (const line of message.split("\n")) {
          if (line.startsWith("event:")) kind = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        }
        if (data.length) yield [kind, data.join("\n")];
      }
    }
  } finally {
    hangUp(); // a browser has few connections to one server
  }
}

function pause(seconds) {
  return new Promise((resolve) => setTimeout(resolve, seconds * 1000));
}
