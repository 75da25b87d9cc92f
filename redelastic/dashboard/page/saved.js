// The page that `redelastic timeline` writes: a run as it was then. It loads nothing and follows nothing.

import { badge, count, duration, h, moment, number, percent, trained } from "./dom.js";
import { eventList } from "./events.js";
import { timeline } from "./timeline.js";

const run = JSON.parse(document.getElementById("run").textContent);
const lanes = timeline(1600);
const events = eventList((id) => run.texts[id]);
const inAll = run.broken ? `${count(run.broken, "broken round")}, in all` : "";
const figures = [
  ["Rounds", number(run.rounds), run.broken ? `${number(run.broken)} broken, ${number(run.faults)} by faults` : ""],
  ["Nodes", number(run.largest), "in the largest round"],
  ["Effective training time", run.ettr === undefined ? "–" : percent(run.ettr), trained(run, duration(run.end - run.start))],
  ["Break to next round", run.down === undefined ? "–" : duration(run.down), inAll],
  ["Break to running workers", run.restart === undefined ? "–" : duration(run.restart), inAll],
  ["Redis away", run.away ? duration(run.away) : "never", ""],
];
const section = (name, element) => h("section", { class: "card", "aria-label": name }, element);
document.getElementById("main").append(h("div", { class: "page" },
  h("div", { class: "head" }, h("h1", { class: "run-name" }, run.run),
    h("div", { class: "verdict" }, badge(run.closed === undefined ? "running" : "closed", run.closed === undefined ? "open" : "closed", run.failed)),
    h("p", { class: "verdict-why" }, run.closed ? `${run.closed} – ` : "", `${moment(run.start)} to ${moment(run.end)}`, run.partial ? "; the time before is not known" : "")),
  h("dl", { class: "figures" }, figures.map(([name, value, note]) => h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "note" }, note)))),
  section("Timeline", lanes.element), section("Events", events.element)));
lanes.update(run.timeline, { now: 0 }); // its end is known: no clock is asked
events.update(run.events);
