// Search runs in a web worker, and browsers start none for a page opened from the disk. There, run it in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe")
    #loaded

    constructor(url) {
      super()
      this.#frame.hidden = true
      document.body.append(this.#frame)
      const inside = this.#frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = async (...urls) => {
        for (const each of urls) await this.#load(each)
      }
      this.#loaded = this.#load(url)
    }

    postMessage(data) {
      this.#loaded.then(() => this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.#frame.remove()
    }

    #load(url) {
      const script = this.#frame.contentDocument.createElement("script")
      script.src = new URL(url, location.href)
      return new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = reject
        this.#frame.contentDocument.body.append(script)
      })
    }
  }
}
