// The document that the server keeps up to date, and the server's clock.

export class Live {
  // run: its id, or null for the list of runs; changed(document) is called when it has changed.
  constructor(run, changed, connection) {
    this.document = null;
    this._offset = 0;
    const source = new EventSource(run === null ? "/live" : `/live?run=${encodeURIComponent(run)}`);
    this._source = source;
    const take = (document, received) => {
      this.document = document;
      if (received.now !== undefined) this._offset = received.now - performance.now() / 1000;
      changed(document);
    };
    source.addEventListener("document", (event) => {
      const received = JSON.parse(event.data);
      take(merged(null, received), received);
    });
    source.addEventListener("patch", (event) => {
      const received = JSON.parse(event.data);
      take(merged(this.document, received), received);
    });
    source.addEventListener("open", () => connection(true));
    source.addEventListener("error", () => connection(false, source.readyState === EventSource.CLOSED));
  }

  get now() {
    return this._offset + performance.now() / 1000;
  }

  close() {
    this._source.close();
  }
}

// RFC 7396. What did not change stays the same object, so that it need not be drawn again. The objects have no prototype: a node
// or a run may be called as a property of every object is.
export function merged(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result = Object.create(null);
  if (target && typeof target === "object" && !Array.isArray(target)) Object.assign(result, target);
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete result[name];
    else result[name] = merged(result[name], value);
  }
  return result;
}
