// Elements, shapes and figures. Text from Redis only ever becomes text: there is no way here to make markup of it.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export function say(element, text) {
  const words = String(text ?? "");
  if (element.textContent !== words) element.textContent = words;
}

// Shapes tell states apart without colour: a disc runs, a half disc changes, a cross is lost, a ring waits.
const SHAPES = {
  disc: () => s("circle", { cx: 6, cy: 6, r: 4.5, fill: "currentColor" }),
  ring: () => s("circle", { cx: 6, cy: 6, r: 3.7, fill: "none", stroke: "currentColor", "stroke-width": 1.8 }),
  half: () => [
    s("circle", { cx: 6, cy: 6, r: 4, fill: "none", stroke: "currentColor", "stroke-width": 1.6 }),
    s("path", { d: "M6 2a4 4 0 0 1 0 8z", fill: "currentColor" }),
  ],
  cross: () => s("path", { d: "M2.5 2.5l7 7m0-7l-7 7", stroke: "currentColor", "stroke-width": 2.4, "stroke-linecap": "round" }),
  square: () => s("rect", { x: 2, y: 2, width: 8, height: 8, rx: 1, fill: "currentColor" }),
  diamond: () => s("path", { d: "M6 1l5 5-5 5-5-5z", fill: "currentColor" }),
  triangle: () => s("path", { d: "M6 1.5l5 9h-10z", fill: "currentColor" }),
  tick: () => s("path", { d: "M2 6.5l3 3 5-7", fill: "none", stroke: "currentColor", "stroke-width": 2, "stroke-linecap": "round", "stroke-linejoin": "round" }),
};

export function shape(name) {
  return s("svg", { class: "shape", viewBox: "0 0 12 12", "aria-hidden": "true" }, SHAPES[name]());
}

// State or event -> [tone, shape]. A tone is a colour of the style sheet.
const LOOKS = {
  __proto__: null, // a state may be called as a property of every object is
  running: ["good", "disc"], completed: ["good", "tick"], started: ["good", "disc"], readmitted: ["good", "tick"],
  forming: ["warn", "half"], regrouping: ["warn", "half"], parked: ["warn", "half"], draining: ["warn", "diamond"], drain: ["warn", "diamond"],
  save: ["calm", "diamond"], admitted: ["good", "ring"],
  outage: ["warn", "square"], cleared: ["warn", "square"], saved: ["calm", "tick"], left: ["calm", "ring"], joined: ["calm", "ring"],
  waiting: ["calm", "ring"], spare: ["calm", "ring"], closed: ["calm", "tick"], empty: ["calm", "ring"],
  silent: ["bad", "cross"], dead: ["bad", "cross"], lost: ["bad", "cross"], missing: ["bad", "cross"], stopped: ["calm", "square"],
  launched: ["calm", "disc"], progressed: ["calm", "disc"],
  log: ["calm", "square"], hung: ["bad", "square"], failed: ["bad", "triangle"], barred: ["bad", "diamond"], refused: ["bad", "diamond"],
  corrupt: ["bad", "square"], unreadable: ["bad", "square"], unreached: ["bad", "square"],
  preflight: ["good", "tick"], outlier: ["bad", "diamond"],
};

// fault: whether something went wrong: a run may be closed, and a node may leave, for that or as asked.
export function looks(state, fault = false) {
  const [tone, form] = LOOKS[state] ?? ["calm", "ring"];
  return fault ? ["bad", form === "tick" ? "square" : form] : [tone, form];
}

export function badge(state, words = state, fault = false) {
  const [tone, form] = looks(state, fault);
  return h("span", { class: `badge ${tone}` }, shape(form), h("span", {}, words));
}

// -- figures

export function duration(seconds) {
  const t = Math.max(0, seconds);
  if (t < 9.95) return `${t.toFixed(1)} s`;
  if (t < 119.5) return `${t.toFixed(0)} s`;
  if (t < 5970) return `${(t / 60).toFixed(0)} min`;
  return t < 172800 ? `${(t / 3600).toFixed(1)} h` : `${(t / 86400).toFixed(1)} d`;
}

export const rough = (seconds) => (seconds < 9.95 ? `${Math.max(0, Math.floor(seconds))} s` : duration(seconds));
export const count = (n, thing) => `${number(n)} ${thing}${n === 1 ? "" : "s"}`;
export const number = (n) => n.toLocaleString("en-US");
export const whose = (event) => (event.count > 1 ? `${event.node} and ${count(event.count - 1, "more node")}` : event.node);
export const percent = (share) => `${(100 * share).toFixed(share > 0.9995 || share === 0 ? 0 : 1)} %`;

// What goes with a run's effective training time: of how long it is a share, or why it is not known.
export function trained(run, time) {
  if (run.ettr === undefined) return "not known: no worker has called redelastic.progress()";
  return `of ${time}${run.partial ? " that are known" : ""}${run.redone ? `; ${percent(run.redone)} made steps again` : ""}`;
}

// Who launched a run, and by which command, as far as known.
export const launched = (run) => [run.user, run.command].filter(Boolean).join(": ");

export const clock = (time) => new Date(1000 * time).toLocaleTimeString("en-GB");

export function speed(perSecond) {
  if (perSecond === undefined) return "–";
  if (perSecond === 0 || perSecond >= 100) return number(Math.round(perSecond));
  if (perSecond >= 0.1) return perSecond.toFixed(perSecond < 10 ? 2 : 1);
  return `1 in ${duration(1 / perSecond)}`;
}

export function moment(time) {
  const at = new Date(1000 * time);
  const today = at.toDateString() === new Date().toDateString();
  const of_day = at.toLocaleTimeString("en-GB");
  return today ? of_day : `${at.toLocaleDateString("en-CA")} ${of_day}`;
}
