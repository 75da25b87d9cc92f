// One run: how it stands, its timeline, its nodes and its events.

import { actionDialog } from "./actions.js";
import { badge, count, duration, h, launched, looks, moment, number, percent, rough, say, shape, speed, trained, whose } from "./dom.js";
import { curveCharts } from "./curves.js";
import { eventList } from "./events.js";
import { failureCard } from "./failure.js";
import { linkRow, span } from "./links.js";
import { nodesTable } from "./nodes.js";
import { timeline } from "./timeline.js";

const PROBLEMS = 6;

export function runView(id) {
  const state = h("div", { class: "verdict" });
  const why = h("p", { class: "verdict-why" });
  const figures = h("dl", { class: "figures" });
  const problems = h("ul", { class: "problems" });
  const what = h("p", { class: "what" });
  const when = h("p", { class: "what when" });
  const failure = failureCard();
  const lanes = timeline();
  const charts = curveCharts();
  const dialog = actionDialog(id);
  const nodes = nodesTable(id, dialog);
  const events = eventList((event) => textOf(id, event));
  const gone = h("p", { class: "card none", hidden: true });
  const known = h("div", {}, figures, problems, failure.element,
    h("section", { class: "card", "aria-label": "Timeline" }, lanes.element),
    charts.element,
    h("section", { class: "card", "aria-label": "Nodes" }, nodes.element),
    h("section", { class: "card", "aria-label": "Events" }, events.element));
  const links = linkRow(false);
  const buttons = h("span", { class: "buttons" }, ["checkpoint", "close", "stop"].map((action) => dialog.button(action)));
  const tools = h("div", { class: "tools", hidden: true }, links.element, h("span", { class: "grow" }), buttons);
  const element = h("div", { class: "page" }, h("div", { class: "head" }, h("h1", { class: "run-name" }, id), what, when, state, why, tools), gone, known, dialog.element);
  const figure = {};
  for (const [name, title] of [["round", "Round"], ["nodes", "Nodes"], ["step", "Step"], ["speed", "Steps per second"], ["ettr", "Effective training time"], ["fault", "Last fault"]]) {
    const value = h("dd");
    const note = h("dd", { class: "note" });
    figure[name] = { value, note };
    figures.append(h("div", {}, h("dt", {}, title), value, note));
  }
  let phase = null;
  let failed = false;
  let shown = null;

  function update(run, live) {
    shown = run;
    gone.hidden = !run.gone;
    say(gone, run.gone);
    known.hidden = run.phase === undefined;
    tools.hidden = true;
    if (run.phase === undefined) return;
    if (phase !== run.phase || failed !== run.failed) {
      ({ phase, failed } = run);
      state.replaceChildren(badge(phase, phase, failed));
      state.className = `verdict ${looks(phase, failed)[0]}`;
    }
    buttons.hidden = !run.actions || phase === "stopped" || (phase === "closed" && !Object.keys(run.nodes).length);
    links.update(run.links, { run: id, ...span(run, live) });
    tools.hidden = buttons.hidden && links.element.hidden;
    say(what, launched(run));
    what.hidden = what.textContent === "";
    const reasons = phase === "running" ? [] : [run.why, ["dead", "empty"].includes(phase) ? "" : run.waits_for];
    say(why, reasons.filter(Boolean).join(" – "));
    why.hidden = why.textContent === "";
    say(figure.nodes.value, run.max === undefined || run.members === run.max ? number(run.members) : `${number(run.members)} of ${number(run.max)}`);
    say(figure.nodes.note, [run.waiting && `${number(run.waiting)} waiting`, run.spares && count(run.spares, "spare"),
      run.min !== undefined && run.min !== run.max && `at least ${number(run.min)}`].filter(Boolean).join(", "));
    say(figure.step.value, run.step === undefined ? "–" : number(run.step));
    const idle = Math.min(...Object.values(run.nodes).map((node) => node.idle ?? Infinity));
    say(figure.step.note, idle === Infinity ? "" : `progress ${duration(idle)} ago`);
    say(figure.speed.value, speed(phase === "running" ? run.speed : undefined));
    say(figure.speed.note, run.restarts ? count(run.restarts, "restart") : "");
    say(figure.ettr.value, run.ettr === undefined ? "–" : percent(run.ettr));
    say(figure.fault.value, run.fault ? run.fault.event : "none");
    const wrong = troubles(run);
    problems.hidden = wrong.length === 0;
    problems.replaceChildren(...wrong);
    failure.update(run.failure);
    lanes.update(run.timeline ?? {}, live, run.heard);
    charts.update(run.curves ?? {});
    nodes.update(run, live);
    events.update(run.events ?? {});
    tick(live);
  }

  function tick(live) {
    if (!shown || shown.phase === undefined) return;
    const now = live.now;
    say(figure.round.value, shown.round === undefined ? "–" : number(shown.round));
    say(figure.round.note, shown.round_at === undefined ? "" : phase === "running" ? `up ${rough(now - shown.round_at)}` : `formed ${rough(now - shown.round_at)} ago`);
    say(when, lasted(shown, now));
    say(figure.ettr.note, shown.since === undefined ? "" : trained(shown, rough((shown.until ?? now) - shown.since)));
    say(figure.fault.note, shown.fault ? [whose(shown.fault), `${rough(now - shown.fault.time)} ago`].filter(Boolean).join(", ") : "");
    lanes.tick(live);
    nodes.tick(live);
  }

  return { element, update, tick, close: () => { lanes.close(); charts.close(); nodes.close(); dialog.close(); } };
}

// When a run began, as far as its events tell, and how long ago that is or how long it took.
function lasted(run, now) {
  if (run.since === undefined) return "";
  const took = run.until === undefined ? `${rough(now - run.since)} ago` : `lasted ${rough(run.until - run.since)}`;
  return `${run.partial ? "known since" : "started at"} ${moment(run.since)}, ${took}`;
}

function troubles(run) {
  const found = run.problems.map((text) => [null, text, "bad"]);
  for (const node of Object.values(run.nodes)) for (const text of node.problems ?? []) found.push([node, text, "bad"]);
  for (const node of Object.values(run.nodes)) if (node.draining) found.push([node, `is to drain, ${node.draining}`, "warn"]);
  const lines = found.slice(0, PROBLEMS).map(([node, text, tone]) => h("li", {},
    h("span", { class: `badge ${tone}` }, shape(tone === "bad" ? "triangle" : "diamond")),
    h("span", {}, node ? h("b", {}, node.name) : "", node && node.rank !== undefined ? ` (rank ${node.rank})` : "", node ? " " : "", text)));
  if (found.length > PROBLEMS) lines.push(h("li", { class: "dim" }, `and ${found.length - PROBLEMS} more: sort the nodes by state`));
  return lines;
}

async function textOf(run, event) {
  const answer = await fetch(`/api/runs/${encodeURIComponent(run)}?event=${encodeURIComponent(event)}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found.detail || found.nodes.join("\n");
}
