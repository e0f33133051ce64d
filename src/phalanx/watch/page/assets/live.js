// The source of the data: the server, or, in a report, the file itself.

const PAUSES = [0.5, 1, 2, 3, 5]; // seconds between two tries
const SILENCE = 40; // seconds: the server sends a heartbeat every ten

// The data of a report: {whole: Update, logs: {rank: {stdout, stderr}}, why: WhyAnswer}.
export function embedded() {
  const script = document.querySelector("script#run");
  return script ? new Embedded(parsed(script.textContent)) : null;
}

// The server: its key, and the folder where the cookie is valid.
export class Server {
  #key = "";
  #folder = remembered();

  // Exchanges the key of the link for a cookie and removes it from the address bar: screenshots and the browser history
  // must not reveal it.
  async enter() {
    const key = location.hash.slice(1);
    if (key) {
      this.#key = key; // kept until the server has it: the first try may fail
      history.replaceState(null, "", location.pathname + location.search);
    }
    if (!this.#key) return;
    const answer = await fetch("enter", { method: "POST", body: this.#key, credentials: "same-origin", cache: "no-store" });
    this.#key = "";
    if (!answer.ok) return;
    this.#folder = answer.headers.get("Content-Location") ?? "";
    remember(this.#folder);
  }

  ask(path) {
    return fetch(this.#folder + path, { credentials: "same-origin", cache: "no-store" });
  }

  async json(path) {
    const answer = await this.ask(path).catch(() => {
      throw Object.assign(new Error("connection lost"), { lost: true }); // browsers word it in different ways
    });
    if (!answer.ok) throw Object.assign(new Error((await answer.text()) || `the server answered ${answer.status}`), { status: answer.status });
    return parsed(await answer.text());
  }

  // Changes something. The header proves that this page asks, and not one of another site.
  async post(path, body) {
    const headers = { "X-Phalanx-Token": this.#folder.replace("/", "") };
    const answer = await fetch(this.#folder + path, { method: "POST", body, headers, credentials: "same-origin", cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()) || `the server answered ${answer.status}`);
  }
}

// What an error of a request means. The server of a run ends with it: then `command` shows the same in a terminal.
export function explained(error, model, command) {
  return error.lost && model.ended ? `the run has ended, and the server of this page with it; in a terminal: ${command}` : error.message;
}

export class Remote {
  report = false;
  #server = new Server();
  #run = new URLSearchParams(location.search).get("run"); // of several: `phalanx ui`

  // Calls update(update, whole) for each update, and status("open" | "lost" | "quiet" | "denied" | "ended").
  // `over` returns whether the run has ended: then there is no reconnect. "quiet": the stream ended without the end of
  // the run: the server was stopped, or the run was killed.
  async follow(update, status, over) {
    let entered = false;
    let quiet = false;
    for (let tries = 0; ; tries++) {
      let received = false;
      let last = false;
      try {
        if (!entered) await this.#server.enter();
        entered = true;
        const answer = await this.#server.ask(this.#path("live"));
        if (answer.status === 401 || answer.status === 403) return status("denied");
        if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
        for await (const [kind, data] of messages(answer.body)) {
          last = kind === "end";
          if (last) break;
          if (kind === "update") quiet = false;
          if (!quiet) status("open");
          received = true;
          update(parsed(data), kind === "whole");
        }
      } catch (error) {
        if (!(error instanceof TypeError)) console.warn(String(error)); // a TypeError is a lost connection
      }
      if (over()) return status("ended");
      if (received) tries = 0;
      quiet = last;
      status(last ? "quiet" : "lost");
      await pause(last ? PAUSES.at(-1) : PAUSES[Math.min(tries, PAUSES.length - 1)]);
      await visible();
    }
  }

  log(rank, stream, start) {
    const query = new URLSearchParams({ rank, stream });
    if (start !== null) query.set("start", start);
    return this.#server.json(this.#path("log", query));
  }

  search(text, ranks) {
    const query = new URLSearchParams({ text });
    if (ranks) query.set("ranks", ranks.join(","));
    return this.#server.json(this.#path("search", query));
  }

  why() {
    return this.#server.json(this.#path("why"));
  }

  get several() {
    return this.#run !== null;
  }

  #path(name, query = new URLSearchParams()) {
    if (this.#run !== null) query.set("run", this.#run);
    return query.size ? `${name}?${query}` : name;
  }
}

// For other tabs and reloads, which have no key. Pages on other ports cannot read this.
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

class Embedded {
  report = true;
  several = false;
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

// Without characters that change the reading direction.
function parsed(text) {
  return JSON.parse(text.replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd"));
}

// Server-sent events by fetch: EventSource does not report why a request was refused.
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
    hangUp(); // browsers limit the connections per server
  }
}

// Waits until the tab is visible: hidden tabs do not reconnect.
async function visible() {
  while (document.visibilityState !== "visible") {
    await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}

function pause(seconds) {
  return new Promise((resolve) => setTimeout(resolve, seconds * 1000));
}
