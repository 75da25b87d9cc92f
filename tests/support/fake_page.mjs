// Runs the dashboard's modules without a browser, on the documents in a file of JSON lines; prints how many it has drawn.
// What they draw is kept as plain objects, and nothing is laid out.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: new Map(), style: {}, dataset: {}, clientWidth: 900, clientHeight: 400, hidden: false });
    this.classList = { toggle() {}, add() {}, remove() {} };
    this.own = "";
  }

  setAttribute(name, value) { this.attributes.set(name, String(value)); }
  removeAttribute(name) { this.attributes.delete(name); }
  addEventListener() {}
  append(...added) { for (const one of added) this.insertBefore(one, null); }
  after(one) { this.parentNode.insertBefore(one, this.nextSibling); }
  replaceChildren(...added) { this.children = []; this.append(...added); }
  insertBefore(one, before) {
    if (one instanceof Element) {
      one.remove();
      one.parentNode = this;
    }
    const at = before ? this.children.indexOf(before) : this.children.length;
    this.children.splice(at, 0, one);
  }

  remove() {
    if (this.parentNode) this.parentNode.children.splice(this.parentNode.children.indexOf(this), 1);
    this.parentNode = undefined;
  }

  get firstChild() { return this.children[0]; }
  get nextSibling() { return this.parentNode?.children[this.parentNode.children.indexOf(this) + 1] ?? null; }
  get value() { return ""; }
  get textContent() { return this.own + this.children.map((child) => child.textContent ?? child).join(""); }
  set textContent(words) { this.children = []; this.own = words; }
}

globalThis.document = { createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag) };
globalThis.ResizeObserver = class { observe() {} disconnect() {} };
globalThis.requestAnimationFrame = () => 0;

const [, , folder, file] = process.argv;
const module = (name) => import(pathToFileURL(`${folder}/${name}`));
const [{ merged }, { runView }, { runsView }, { timeline }, { eventList }] = await Promise.all(["live.js", "run.js", "runs.js", "timeline.js", "events.js"].map(module));

let drawn = 0;
let before = null;
for (const line of readFileSync(file, "utf8").split("\n").filter(Boolean)) {
  const received = JSON.parse(line);
  const now = { now: received.now };
  for (const page of [merged(null, received), merged(before, received)]) {
    const view = runView("r");
    view.update(page, now);
    view.tick(now);
    for (const id of Object.keys(received.nodes)) if (!Object.hasOwn(page.nodes, id)) throw new Error(`the node ${id} is lost`);
    const rows = Object.assign(Object.create(null), { [received.run]: page });
    runsView(() => {}).update({ runs: rows }, now);
  }
  const lanes = timeline(1600);
  lanes.update(received.timeline, now);
  eventList(() => "").update(received.events);
  before = received;
  drawn += 1;
}
console.log(drawn);
