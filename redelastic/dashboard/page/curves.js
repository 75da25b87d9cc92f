// What the nodes measured in each of the last minutes: a chart for each figure that is known.

import { duration, h, moment, percent, s, say, speed } from "./dom.js";

const share = (value) => percent(value / 100);
const CHARTS = [ // the figure's name, the chart's title, how to say a value, and where the scale ends if that is fixed
  ["speed", "Steps per second", speed],
  ["idle", "Longest without a step", duration],
  ["memory", "Memory of the hosts", share, 100],
  ["gpu", "Use of the GPUs", share, 100],
  ["gpu_memory", "Memory of the GPUs", share, 100],
];
const HEIGHT = 84; // pixels
const TOP = 6;
const BOTTOM = 18;
const SHORTEST = 10; // minutes across

export function curveCharts() {
  const charts = CHARTS.map((one) => chart(...one));
  const element = h("section", { class: "card", "aria-label": "Curves", hidden: true },
    h("div", { class: "card-head" }, h("h2", {}, "The last hours")), h("div", { class: "charts" }, charts.map((one) => one.element)));
  let shown = null;

  function update(points) {
    if (points === shown) return;
    shown = points;
    for (const one of charts) one.update(points);
    element.hidden = charts.every((one) => one.element.hidden);
    draw();
  }

  function draw() {
    if (!element.hidden) for (const one of charts) one.draw();
  }

  const watcher = new ResizeObserver(draw);
  watcher.observe(element);
  return { element, update, close: () => watcher.disconnect() };
}

function chart(name, title, words, most) {
  const last = h("b");
  const svg = s("svg", { role: "img" });
  const tip = h("div", { class: "tip", hidden: true });
  const element = h("div", { class: "chart" }, h("h3", {}, title, last), svg, tip);
  let values = []; // [minute, value], without those that are not known
  let scale = null;

  function update(points) {
    values = Object.entries(points).filter(([, point]) => point[name] !== undefined).map(([minute, point]) => [Number(minute), point[name]]);
    element.hidden = values.length < 2;
  }

  function draw() {
    if (element.hidden) return;
    const width = Math.max(200, element.clientWidth);
    const end = values.at(-1)[0];
    const start = Math.min(values[0][0], end - SHORTEST);
    const top = most ?? 1.1 * Math.max(1e-9, ...values.map(([, value]) => value));
    const x = (minute) => ((minute - start) / (end - start)) * (width - 2) + 1;
    const y = (value) => TOP + (1 - Math.min(1, value / top)) * HEIGHT;
    scale = { x, y, start, end, width };
    const [line, under] = paths(x, y);
    svg.setAttribute("viewBox", `0 0 ${width} ${TOP + HEIGHT + BOTTOM}`);
    svg.setAttribute("height", TOP + HEIGHT + BOTTOM);
    svg.replaceChildren(s("path", { class: "under", d: under }), s("path", { class: "curve", d: line }),
      s("line", { class: "axis", x1: 0, x2: width, y1: TOP + HEIGHT, y2: TOP + HEIGHT }),
      text(1, "start", moment(60 * start)), text(width - 1, "end", moment(60 * (end + 1))));
    say(last, words(values.at(-1)[1]));
    const all = values.map(([, value]) => value);
    svg.setAttribute("aria-label", `${title}: from ${words(Math.min(...all))} to ${words(Math.max(...all))}, now ${words(all.at(-1))}`);
  }

  // A gap where a minute is missing.
  function paths(x, y) {
    let [line, under, begun] = ["", "", null];
    values.forEach(([minute, value], i) => {
      const [px, py] = [x(minute).toFixed(1), y(value).toFixed(1)];
      const continues = begun !== null && values[i - 1][0] === minute - 1;
      line += `${continues ? "L" : "M"}${px} ${py}`;
      if (!continues) {
        if (begun !== null) under += `V${TOP + HEIGHT}Z`;
        begun = minute;
        under += `M${px} ${TOP + HEIGHT}V${py}`;
      } else under += `L${px} ${py}`;
      if (!continues && values[i + 1]?.[0] !== minute + 1) line += "h0.1"; // a point alone
    });
    return [line, `${under}V${TOP + HEIGHT}Z`];
  }

  const text = (x, anchor, content) => s("text", { class: "axis-number", x, y: TOP + HEIGHT + 13, "text-anchor": anchor }, content);

  function point(event) {
    const at = svg.getBoundingClientRect();
    const px = event.clientX - at.left;
    const minute = scale.start + (px / scale.width) * (scale.end - scale.start);
    const [nearest, value] = values.reduce((best, one) => (Math.abs(one[0] - minute) < Math.abs(best[0] - minute) ? one : best));
    svg.querySelector(".cursor")?.remove();
    svg.append(s("line", { class: "cursor", x1: scale.x(nearest), x2: scale.x(nearest), y1: TOP, y2: TOP + HEIGHT }));
    say(tip, `${moment(60 * nearest)}: ${words(value)}`);
    tip.hidden = false;
    tip.style.left = `${Math.min(Math.max(0, px - 40), Math.max(0, at.width - tip.offsetWidth))}px`;
    tip.style.top = `${TOP + 30}px`;
  }

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    svg.querySelector(".cursor")?.remove();
  });
  return { element, update, draw };
}
