// The site's search runs in a worker, and a browser starts none for a page that lies in a folder.
// There a hidden frame takes its place: it has the worker's script, and messages go both ways.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const tell = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.postMessage = (data) => {
        tell(this, data);
        this.onmessage?.(new MessageEvent("message", { data }));
      };
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(address, location.href).href;
      this.ready = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${script.src} was not loaded`));
      });
      this.tell = (data) => this.ready.then(() => tell(this.inside, data));
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      this.tell(data);
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
