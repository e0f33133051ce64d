// Between the search box and the worker of mkdocs-material that searches. The worker reads a query as lunr does: it refuses
// "RuntimeError: …" because no field has that name, and takes "-9" for a word that must not occur. People paste messages,
// so every query is plain text here.
function plain(message) {
  if (typeof message.data !== "string") return message; // the index, and no query
  return { ...message, data: message.data.replace(/[:~^\\]/g, " ").replace(/(^|\s)-+/g, "$1") };
}

// lunr merges nodes of its word tree that have the same text. It writes that text without separators, so that two different
// nodes can have the same one ("1" to node 23, or "12" to node 3). Then a search fails with an exception.
function repair(scope) {
  scope.lunr.TokenSet.prototype.toString = function () {
    const edges = Object.keys(this.edges).sort().map((label) => `,${label}${this.edges[label].id}`);
    return this._str || (this.final ? "1" : "0") + edges.join("");
  };
}

if (location.protocol === "file:") {
  // Browsers refuse workers on file:// pages, so there the search runs in a hidden frame. mkdocs-material's offline plugin
  // would fetch a script for this purpose from the network if this file had another name.
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.#frame.contentDocument.createElement("script");
      this.#loaded = new Promise((done) => script.addEventListener("load", done)).then(() => repair(inside));
      script.src = url;
      this.#frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      const inside = this.#frame.contentWindow;
      this.#loaded.then(() => inside.dispatchEvent(new MessageEvent("message", { data: plain(data) })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
} else {
  window.Worker = class extends window.Worker {
    constructor(url) {
      const absolute = JSON.stringify(new URL(url, document.baseURI).href);
      const text = `importScripts(${absolute}); (${repair})(self);`;
      super(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
    }

    postMessage(data) {
      super.postMessage(plain(data));
    }
  };
}
