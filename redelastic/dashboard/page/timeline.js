// The run over time: a lane for each host, what it did, what broke each round. Drawn as one path a state, however many spans.

import { badge, count, duration, h, looks, moment, number, percent, s, say } from "./dom.js";

const STATES = ["training", "redone", "starting", "regrouping", "waiting", "unknown"];
const NAMES = ["training", "steps made again", "starting, until the first step", "last step to next round", "waiting, spare", "not known"];
const THICK = [0.74, 0.74, 0.74, 0.74, 0.3, 0.14];
const REGROUPING = STATES.indexOf("regrouping");
const TOP = 22;
const BOTTOM = 24;
const ROUND_GAP = 26; // pixels between two numbers of rounds
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const RANGES = [["All", Infinity], ["1 h", 3600], ["10 min", 600]];

// tallest: pixels for all lanes.
export function timeline(tallest = 460) {
  const svg = s("svg", { class: "lanes", role: "img", "aria-label": "Timeline" });
  const legend = h("ul", { class: "legend" });
  const tip = h("div", { class: "tip", hidden: true });
  const ranges = h("div", { class: "segments", role: "group", "aria-label": "Time shown" });
  const box = h("div", { class: "lanes-box" }, svg, tip);
  const none = h("p", { class: "none" }, "No node has joined yet.");
  const hosts = h("span", { class: "dim" });
  const element = h("div", {}, h("div", { class: "card-head" }, h("h2", {}, "Timeline"), hosts, h("span", { class: "grow" }), ranges), box, none, legend);
  const items = STATES.map((state, i) => {
    const share = h("b");
    return { item: h("li", {}, h("span", { class: `swatch ${state}` }), NAMES[i], " ", share), share };
  });
  let range = Infinity;
  for (const [name, seconds] of RANGES) {
    const button = h("button", { type: "button", "aria-pressed": String(seconds === range) }, name);
    button.addEventListener("click", () => {
      range = seconds;
      for (const other of ranges.children) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
    ranges.append(button);
  }

  let data = {};
  let rows = [];
  let clockOf = null;
  let heardAt = Infinity;
  let drawnAt = 0;
  let scale = null;

  // heard: until when it is known what the nodes did, as the run's other figures count; later only the lanes go on.
  function update(document_, live, heard = Infinity) {
    clockOf = live;
    heardAt = heard;
    if (document_ === data) {
      if (scale) summary();
      return;
    }
    data = document_;
    rows = lanesOf(data);
    say(hosts, rows.length ? count(rows.length, "host") + (data.cut ? `, from ${moment(data.origin + data.start)} on` : "") : "");
    none.hidden = rows.length > 0;
    box.hidden = rows.length === 0;
    draw();
  }

  function tick() { // a pixel at a time is enough
    if (data.lanes && data.end === undefined && clockOf.now - drawnAt >= (scale?.second ?? 1)) draw();
  }

  function draw() {
    if (!data.lanes || !clockOf) return;
    const width = Math.max(280, box.clientWidth);
    const end = data.end ?? Math.max(data.start + 1, clockOf.now - data.origin);
    const start = Math.max(data.start, end - range);
    const longest = Math.max(0, ...rows.map((row) => row.name.length));
    const height = Math.min(22, tallest / Math.max(1, rows.length));
    const labelled = height >= 11;
    const left = labelled ? Math.min(Math.max(48, 7 * longest + 14), Math.max(90, 0.24 * width)) : 8;
    const tall = Math.max(12, rows.length * height);
    const x = (at) => left + ((at - start) / (end - start)) * (width - left - 10);
    drawnAt = clockOf.now;
    scale = { left, width, height, start, end, second: Math.max(1, (end - start) / (width - left)), at: (px) => start + ((px - left) / (width - left - 10)) * (end - start) };
    svg.setAttribute("viewBox", `0 0 ${width} ${TOP + tall + BOTTOM}`);
    svg.setAttribute("height", TOP + tall + BOTTOM);
    const paths = pathsOf(rows, start, end, height, x);
    const parts = [defs()];
    for (const [from, until] of data.outages ?? []) if (until > start) {
      parts.push(s("rect", { class: "outage", x: x(Math.max(start, from)), y: TOP, width: Math.max(1, x(Math.min(end, until)) - x(Math.max(start, from))), height: tall }));
    }
    paths.forEach((d, i) => { if (d) parts.push(s("path", { class: STATES[i], d })); });
    if (paths[REGROUPING]) parts.push(s("path", { class: "hatch", d: paths[REGROUPING], fill: "url(#hatch)" }));
    parts.push(...roundLines(data.rounds ?? {}, start, end, x, tall), ...axis(start, end, x, TOP + tall));
    if (labelled) rows.forEach((row, i) => parts.push(label(row, i, height, left)));
    const { marks, counts } = marksOf(data, rows, start, end, x, height);
    svg.replaceChildren(...parts, ...marks);
    legend.replaceChildren(...items.map(({ item }) => item), ...Object.entries(counts).reverse().map(([event, { n, fault }]) => h("li", {}, badge(event, event, fault), h("b", {}, number(n)))));
    if (data.outages?.length) legend.append(h("li", {}, h("span", { class: "swatch outage" }), "Redis away"));
    summary();
  }

  function summary() {
    const seconds = secondsOf(rows, scale.start, Math.min(data.end ?? clockOf.now - data.origin, heardAt - data.origin));
    const all = seconds.reduce((a, b) => a + b, 0);
    items.forEach(({ item, share }, i) => {
      item.hidden = !seconds[i];
      say(share, all ? percent(seconds[i] / all) : "");
    });
    const words = STATES.map((_, i) => seconds[i] && `${NAMES[i]} ${percent(seconds[i] / all)}`).filter(Boolean);
    svg.setAttribute("aria-label", `Timeline of ${rows.length} hosts over ${duration(scale.end - scale.start)}: ${words.join(", ")}. The events below say what happened.`);
  }

  function point(event) {
    const at = svg.getBoundingClientRect();
    const [px, py] = [event.clientX - at.left, event.clientY - at.top];
    const row = scale && rows[Math.floor((py - TOP) / scale.height)];
    const time = scale?.at(px);
    const found = row && py >= TOP && row.spans.find(([, from, until]) => from <= time && time < (until < 0 ? scale.end : until));
    tip.hidden = !found;
    if (!found) return;
    const [state, from, until, epoch, rank] = found;
    const where = [epoch && `round ${epoch}`, rank >= 0 && `rank ${rank}`].filter(Boolean).join(", ");
    say(tip, `${row.name}: ${NAMES[state]} for ${duration((until < 0 ? scale.end : until) - from)}${where ? ` (${where})` : ""}, from ${moment(data.origin + from)}`);
    tip.style.left = `${Math.min(Math.max(0, px - 40), Math.max(0, at.width - tip.offsetWidth))}px`;
    tip.style.top = `${py + 18}px`;
  }

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
  const watcher = new ResizeObserver(draw);
  watcher.observe(box);
  return { element, update, tick, close: () => watcher.disconnect() };
}

// A lane for each host; the nodes of one host share it when they come one after the other.
function lanesOf(data) {
  const rows = [];
  const byName = new Map();
  for (const [id, lane] of Object.entries(data.lanes ?? {})) {
    const spans = Object.entries(lane.spans).sort(([a], [b]) => a - b).map(([, span]) => span);
    if (!spans.length) continue;
    const same = byName.get(lane.name) ?? [];
    byName.set(lane.name, same);
    let row = same.find((other) => other.until <= spans[0][1]);
    if (!row) {
      row = { name: lane.name + (same.length ? ` #${same.length + 1}` : ""), ids: new Set(), spans: [], until: 0 };
      same.push(row);
      rows.push(row);
    }
    row.ids.add(id);
    row.spans.push(...spans);
    const last = spans[spans.length - 1][2];
    row.until = last < 0 ? Infinity : last;
  }
  return rows.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

function pathsOf(rows, start, end, height, x) {
  const paths = STATES.map(() => []);
  rows.forEach((row, i) => {
    for (const [state, from, until] of row.spans) {
      const [a, b] = [Math.max(start, from), Math.min(end, until < 0 ? end : until)];
      if (b <= a) continue;
      const thick = height < 4 ? height + 0.15 : height * THICK[state];
      const [x0, x1] = [x(a), x(b)];
      paths[state].push(`M${x0.toFixed(1)} ${(TOP + i * height + (height - thick) / 2).toFixed(2)}h${Math.max(0.5, x1 - x0).toFixed(1)}v${thick.toFixed(2)}H${x0.toFixed(1)}z`);
    }
  });
  return paths.map((path) => path.join(""));
}

function secondsOf(rows, start, end) {
  const seconds = STATES.map(() => 0);
  for (const row of rows) for (const [state, from, until] of row.spans) {
    seconds[state] += Math.max(0, Math.min(end, until < 0 ? end : until) - Math.max(start, from));
  }
  return seconds;
}

function defs() {
  const pattern = s("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("rect", { class: "hatch-line", width: 2, height: 6 }));
  return s("defs", {}, pattern);
}

function roundLines(rounds, start, end, x, tall) {
  const parts = [];
  let last = -Infinity;
  for (const [epoch, [at]] of Object.entries(rounds)) {
    if (at < start || at > end) continue;
    const px = x(at);
    parts.push(s("line", { class: "round", x1: px, x2: px, y1: TOP - 4, y2: TOP + tall }));
    if (px - last >= ROUND_GAP) {
      parts.push(text(epoch, px, TOP - 9, "round-number", "middle"));
      last = px;
    }
  }
  return parts;
}

function axis(start, end, x, y) {
  const span = end - start;
  const widest = STEPS[STEPS.length - 1];
  const fitting = (size) => x(start + size) - x(start) >= 76;
  const step = STEPS.find(fitting) ?? widest * Math.ceil(76 / (x(start + widest) - x(start))); // also of a span that is made up
  const parts = [s("line", { class: "axis", x1: x(start), x2: x(end), y1: y + 2, y2: y + 2 })];
  for (let at = Math.ceil(start / step) * step; at <= end; at += step) {
    if (x(end) - x(at) < 18 && span > step) break;
    parts.push(s("line", { class: "axis", x1: x(at), x2: x(at), y1: y + 2, y2: y + 6 }), text(ago(at, step), x(at), y + 19, "axis-number", at === 0 && x(at) < 20 ? "start" : "middle"));
  }
  return parts;
}

function ago(at, step) {
  if (step >= 86400) return `${at / 86400} d`;
  const [hours, minutes, seconds] = [Math.floor(at / 3600), Math.floor((at % 3600) / 60), Math.round(at % 60)];
  const two = (n) => String(n).padStart(2, "0");
  if (step >= 60) return hours || step >= 3600 ? `${hours}:${two(minutes)} h` : `${minutes} min`;
  return at < 60 ? `${seconds} s` : `${hours ? `${hours}:${two(minutes)}` : minutes}:${two(seconds)}`;
}

function label(row, i, height, left) {
  const most = Math.max(4, Math.floor((left - 14) / 6.6));
  const name = row.name.length <= most ? row.name : `${row.name.slice(0, Math.ceil(most / 2))}…${row.name.slice(1 - Math.floor(most / 2))}`;
  const element = text(name, left - 8, TOP + (i + 0.5) * height + 4, "lane-name", "end");
  element.style.fontSize = `${Math.min(12, 0.92 * height)}px`;
  element.append(s("title", {}, row.name));
  return element;
}

const MARKS = {
  cross: "M-3.5-3.5l7 7m0-7l-7 7", square: "M-3.5-3.5h7v7h-7z", triangle: "M0-4.5l4.5 8h-9z", diamond: "M0-5l5 5-5 5-5-5z", tick: "M-4 0l3 3 5-6", ring: "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0", half: "M-3 0h6", disc: "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
};

function marksOf(data, rows, start, end, x, height) {
  const places = new Map();
  rows.forEach((row, i) => row.ids.forEach((id) => places.set(id, i)));
  const marks = [];
  const counts = {};
  for (const [at, event, node, reason, fault] of Object.values(data.marks ?? {})) {
    if (at < start || at > end || !places.has(node)) continue;
    const [tone, form] = looks(event, fault);
    const y = TOP + (places.get(node) + 0.5) * height;
    const group = s("g", { class: `mark ${tone} ${form}`, transform: `translate(${x(at).toFixed(1)} ${y.toFixed(1)})` }, s("path", { class: "halo", d: MARKS[form] }), s("path", { class: "form", d: MARKS[form] }));
    group.append(s("title", {}, `${node.replace(/-[0-9a-f]{12}$/, "")}: ${event}, ${reason} (${moment(data.origin + at)})`));
    marks.push(group);
    counts[event] = { n: (counts[event]?.n ?? 0) + 1, fault: fault || counts[event]?.fault };
  }
  return { marks, counts };
}

function text(words, x, y, kind, anchor) {
  const element = s("text", { class: kind, x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor });
  element.textContent = words;
  return element;
}
