// The list of runs.

import { badge, count, duration, h, launched, moment, number, percent, rough, say, speed, whose } from "./dom.js";
import { sorting } from "./sorting.js";

const OVER = ["closed", "stopped", "empty"];
const ORDER = ["corrupt", "unreadable", "dead", "regrouping", "forming", "running", "empty", "stopped", "closed"];

const COLUMNS = [
  { name: "state", title: "State", key: (run) => ORDER.indexOf(run.phase) },
  { name: "run", title: "Run", key: (run) => run.run },
  { name: "started", title: "Started", falls: true, key: (run) => run.since },
  { name: "nodes", title: "Nodes", kind: "num", falls: true, key: (run) => run.members },
  { name: "step", title: "Step", kind: "num", falls: true, key: (run) => run.step },
  { name: "speed", title: "Steps/s", kind: "num", falls: true, key: (run) => run.speed },
  { name: "ettr", title: "Effective training time", kind: "meter-head", key: (run) => run.ettr },
  { name: "fault", title: "Last fault", falls: true, key: (run) => run.fault?.time },
];

export function runsView(open) {
  const rows = new Map();
  const body = h("tbody");
  let found = [];
  const sorted = sorting(COLUMNS, arrange);
  const table = h("table", { class: "runs" }, h("thead", {}, h("tr", {}, sorted.heads)), body);
  const filter = h("input", { type: "search", placeholder: "Filter by name, user, fault", "aria-label": "Filter runs by name, user, command or fault", autocomplete: "off", spellcheck: "false" });
  const none = h("p", { class: "none" });
  const title = h("h1", {}, "Runs");
  const sum = h("p", { class: "sub" });
  const element = h("div", { class: "page" }, h("div", { class: "head with-filter" }, h("div", { class: "grow" }, title, sum), filter), h("section", { class: "card" }, table, none));
  filter.addEventListener("input", arrange);

  function arrange() {
    const words = filter.value.trim().toLowerCase();
    const shown = found.filter((run) => !words || [run.run, run.phase, run.why, run.user, run.command, run.fault?.event, run.fault?.reason].some((text) => text?.toLowerCase().includes(words)));
    shown.sort((a, b) => sorted.compare(a, b) || a.run.localeCompare(b.run, "en", { numeric: true }));
    const ids = new Set(shown.map((run) => run.run));
    for (const [id, row] of rows) if (!ids.has(id)) { row.element.remove(); rows.delete(id); }
    shown.forEach((run, i) => {
      if (!rows.has(run.run)) rows.set(run.run, runRow(run.run, open));
      const row = rows.get(run.run);
      if (row.run !== run) row.update(run);
      if (body.children[i] !== row.element) body.insertBefore(row.element, body.children[i] ?? null);
    });
    table.hidden = shown.length === 0;
    none.hidden = shown.length > 0;
    say(none, found.length ? "No run has this name, user, command or fault." : "No runs yet. A run appears when its first node joins.");
    filter.hidden = found.length < 2;
  }

  function update(document_, live) {
    found = Object.values(document_.runs ?? {});
    arrange();
    const nodes = found.reduce((all, run) => all + (run.members ?? 0), 0);
    const running = found.filter((run) => run.phase === "running").length;
    const more = document_.unlisted ? `; ${count(document_.unlisted, "more run")} not listed: see /runs/RUN for each` : "";
    say(sum, found.length ? `${running} of ${count(found.length, "run")} running, on ${count(nodes, "node")}${more}` : "");
    tick(live);
  }

  function tick(live) {
    for (const row of rows.values()) row.tick(live.now);
  }

  return { element, update, tick };
}

function runRow(id, open) {
  const link = h("a", { href: `/runs/${encodeURIComponent(id)}` });
  say(link, id);
  const state = h("td", { class: "state" });
  const what = h("div", { class: "what clip" });
  const why = h("div", { class: "why" });
  const startedAt = h("div");
  const lasted = h("div", { class: "dim" });
  const started = h("td", { class: "started" }, startedAt, lasted);
  const cells = Object.fromEntries(["nodes", "step", "speed"].map((name) => [name, h("td", { class: `num ${name}` })]));
  const bar = h("span", { class: "bar-fill" });
  const share = h("span", { class: "share" });
  const ettr = h("td", { class: "ettr" }, h("div", { class: "ettr-box" }, share, h("span", { class: "bar-track", "aria-hidden": "true" }, bar)));
  const faultWhat = h("div", { class: "clip" });
  const faultWhen = h("div", { class: "dim" });
  const fault = h("td", { class: "fault" }, faultWhat, faultWhen);
  const element = h("tr", {}, state, h("td", { class: "name" }, link, what, why), started, cells.nodes, cells.step, cells.speed, ettr, fault);
  element.addEventListener("click", (event) => {
    if (!event.target.closest("a") && !getSelection().toString()) open(link.getAttribute("href"));
  });
  const row = {
    element,
    run: null,
    update(run) {
      row.run = run;
      element.classList.toggle("over", OVER.includes(run.phase));
      state.replaceChildren(badge(run.phase, run.phase, run.failed));
      say(startedAt, run.since === undefined ? "–" : moment(run.since));
      started.title = run.until === undefined ? "" : `ended at ${moment(run.until)}`;
      say(what, launched(run));
      what.hidden = what.textContent === "";
      say(why, run.why);
      why.hidden = !run.why;
      why.classList.toggle("bad", run.phase === "running");
      const most = run.max ?? run.members;
      say(cells.nodes, run.members === undefined || (!run.members && OVER.includes(run.phase)) ? "–" : run.members === most ? number(most) : `${number(run.members)} of ${number(most)}`);
      say(cells.step, run.step === undefined ? "–" : number(run.step));
      say(cells.speed, speed(run.phase === "running" ? run.speed : undefined));
      say(share, run.ettr === undefined ? "–" : percent(run.ettr));
      bar.style.width = `${100 * (run.ettr ?? 0)}%`;
      say(faultWhat, run.fault ? `${run.fault.node ? `${whose(run.fault)} ` : ""}${run.fault.reason || run.fault.event}` : "none");
      faultWhat.title = run.fault ? moment(run.fault.time) : "";
      fault.classList.toggle("dim", !run.fault);
    },
    tick(now) {
      const run = row.run;
      if (run?.since !== undefined) say(lasted, `${run.until === undefined ? "for" : "lasted"} ${duration((run.until ?? now) - run.since)}`);
      say(faultWhen, run?.fault ? `${rough(now - run.fault.time)} ago` : "");
    },
  };
  return row;
}

