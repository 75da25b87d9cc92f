// The list of runs.

import { badge, count, h, moment, number, percent, rough, say, speed, whose } from "./dom.js";

const OVER = ["closed", "stopped", "empty"];
const ORDER = ["corrupt", "unreadable", "dead", "regrouping", "forming", "running", "empty", "stopped", "closed"];

export function runsView(open) {
  const rows = new Map();
  const body = h("tbody");
  const heads = [["State"], ["Run"], ["Nodes", "num"], ["Step", "num"], ["Steps/s", "num"], ["Effective training time", "meter-head"], ["Last fault"]];
  const table = h("table", { class: "runs" },
    h("thead", {}, h("tr", {}, heads.map(([title, kind]) => h("th", { scope: "col", class: kind }, title)))), body);
  const none = h("p", { class: "none" }, "No runs yet. A run appears when its first node joins.");
  const title = h("h1", {}, "Runs");
  const sum = h("p", { class: "sub" });
  const element = h("div", { class: "page" }, h("div", { class: "head" }, title, sum), h("section", { class: "card" }, table, none));

  function update(document_, live) {
    const found = Object.values(document_.runs ?? {});
    found.sort((a, b) => ORDER.indexOf(a.phase) - ORDER.indexOf(b.phase) || a.run.localeCompare(b.run, "en", { numeric: true }));
    const ids = new Set(found.map((run) => run.run));
    for (const [id, row] of rows) if (!ids.has(id)) { row.element.remove(); rows.delete(id); }
    found.forEach((run, i) => {
      if (!rows.has(run.run)) rows.set(run.run, runRow(run.run, open));
      const row = rows.get(run.run);
      if (row.run !== run) row.update(run);
      if (body.children[i] !== row.element) body.insertBefore(row.element, body.children[i] ?? null);
    });
    table.hidden = found.length === 0;
    none.hidden = found.length > 0;
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
  const why = h("div", { class: "why" });
  const cells = Object.fromEntries(["nodes", "step", "speed"].map((name) => [name, h("td", { class: `num ${name}` })]));
  const bar = h("span", { class: "bar-fill" });
  const share = h("span", { class: "share" });
  const ettr = h("td", { class: "ettr" }, h("div", { class: "ettr-box" }, share, h("span", { class: "bar-track", "aria-hidden": "true" }, bar)));
  const faultWhat = h("div", { class: "clip" });
  const faultWhen = h("div", { class: "dim" });
  const fault = h("td", { class: "fault" }, faultWhat, faultWhen);
  const element = h("tr", {}, state, h("td", { class: "name" }, link, why), cells.nodes, cells.step, cells.speed, ettr, fault);
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
      say(faultWhen, run?.fault ? `${rough(now - run.fault.time)} ago` : "");
    },
  };
  return row;
}

