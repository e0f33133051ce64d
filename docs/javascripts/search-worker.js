// Browsers refuse workers on file:// pages, so there the search runs in a hidden frame. mkdocs-material's offline plugin
// would fetch a script with this purpose from the network.
if (location.protocol === "file:") {
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
      this.#loaded = new Promise((done) => script.addEventListener("load", done));
      script.src = url;
      this.#frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      const inside = this.#frame.contentWindow;
      this.#loaded.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
