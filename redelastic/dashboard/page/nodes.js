// The run's nodes: a table of which only the rows in sight exist, so that a thousand nodes cost no more than thirty.

import { badge, count, duration, h, looks, number, say } from "./dom.js";
import { linkRow, span } from "./links.js";
import { sorting } from "./sorting.js";
import { tailView } from "./tail.js";

const ROW = 36; // pixels, as in the style sheet
const WHOLE = 40; // up to so many nodes the page shows all, without a scroll bar of its own
const SPARE_ROWS = 6; // above and below what is in sight

const SEVERITY = { bad: 0, warn: 1, calm: 2, good: 3 };
const wrong = (node) => (node.problems ? 0 : node.draining ? 1 : 2);

const COLUMNS = [
  { name: "rank", title: "Rank", kind: "num", key: (n) => n.rank, text: (n) => n.rank ?? "" },
  { name: "node", title: "Node", key: (n) => n.name },
  { name: "state", title: "State", key: (n) => 10 * wrong(n) + SEVERITY[looks(n.state)[0]] },
  { name: "lease", title: "Lease left", kind: "num", key: (n) => n.until },
  { name: "step", title: "Step", kind: "num", key: (n) => n.step, text: (n) => (n.step === undefined ? "" : number(n.step)) },
  { name: "idle", title: "Idle", kind: "num", falls: true, key: (n) => n.idle, text: (n) => (n.idle === undefined ? "" : duration(n.idle)) },
  { name: "cpu", title: "CPU", kind: "num wide", falls: true, key: (n) => n.cpu, text: (n) => (n.cpu === undefined ? "" : `${number(n.cpu)} %`) },
  { name: "memory", title: "Memory", kind: "num wide", falls: true, key: (n) => n.memory, text: (n) => (n.memory === undefined ? "" : `${n.memory.toFixed(1)} GiB`) },
  { name: "gpus", title: "GPUs", kind: "gpus", key: (n) => n.gpus?.reduce((sum, gpu) => sum + gpu[0], 0) },
];

// dialog: for the run's actions.
export function nodesTable(run, dialog) {
  const heading = h("h2", {}, "Nodes");
  const filter = h("input", { type: "search", placeholder: "Filter by name or state", "aria-label": "Filter nodes by name or state", autocomplete: "off", spellcheck: "false" });
  const body = h("tbody");
  const above = h("tr", { class: "gap", "aria-hidden": "true" }, h("td", { colspan: COLUMNS.length }));
  const below = h("tr", { class: "gap", "aria-hidden": "true" }, h("td", { colspan: COLUMNS.length }));
  const sorted = sorting(COLUMNS, arrange);
  const table = h("table", { class: "nodes" }, h("thead", {}, h("tr", {}, sorted.heads)), body);
  const scroller = h("div", { class: "scroller", tabindex: 0, role: "region", "aria-label": "Nodes, to scroll" }, table);
  const none = h("p", { class: "none" });
  const hidden = h("p", { class: "note-line" });
  const element = h("div", {}, h("div", { class: "card-head" }, heading, h("span", { class: "grow" }), filter), scroller, none, hidden);
  const panel = nodePanel(run, dialog);
  element.append(panel.element);

  const rows = new Map();
  let shownRun = null;
  let order = [];

  function arrange() {
    if (!shownRun) return;
    const words = filter.value.trim().toLowerCase();
    const called = new Map();
    for (const node of Object.values(shownRun.nodes)) called.set(node.name, (called.get(node.name) ?? 0) + 1);
    order = Object.entries(shownRun.nodes).filter(([id, node]) => !words || [id, node.host, node.state].some((text) => text?.toLowerCase().includes(words)));
    order.sort(([, a], [, b]) => sorted.compare(a, b) || a.place - b.place);
    order = order.map(([id, node]) => [id, node, called.get(node.name) > 1 ? id.replace(/-[0-9a-f]{12}$/, "") : node.name]);
    draw();
  }

  function draw() {
    const all = order.length <= WHOLE;
    scroller.classList.toggle("tall", !all);
    const seen = Math.ceil(Math.max(600, scroller.clientHeight) / ROW); // it is as high as what was drawn
    const first = all ? 0 : Math.max(0, Math.min(order.length - seen, Math.floor(scroller.scrollTop / ROW)) - SPARE_ROWS);
    const shown = all ? order : order.slice(first, first + seen + 2 * SPARE_ROWS);
    const ids = new Set(shown.map(([id]) => id));
    for (const [id, row] of rows) if (!ids.has(id)) { row.element.remove(); rows.delete(id); }
    above.firstChild.style.height = `${ROW * first}px`;
    below.firstChild.style.height = `${ROW * (order.length - first - shown.length)}px`;
    if (above.parentNode !== body) body.append(above, below);
    let before = above;
    for (const [id, node, name] of shown) {
      let row = rows.get(id);
      if (!row) rows.set(id, (row = nodeRow(id, panel)));
      row.update(node, name, shownRun);
      if (before.nextSibling !== row.element) before.after(row.element);
      before = row.element;
    }
    for (const column of ["step", "idle", "cpu", "memory", "gpus"]) {
      table.classList.toggle(`no-${column}`, !has[column]);
    }
    table.setAttribute("aria-rowcount", order.length + 1);
  }

  const has = {};
  function update(run_, live) {
    if (!shownRun || shownRun.nodes !== run_.nodes || shownRun.step !== run_.step) {
      shownRun = run_;
      const nodes = Object.values(run_.nodes);
      has.step = nodes.some((n) => n.step !== undefined);
      has.idle = nodes.some((n) => n.idle !== undefined);
      for (const name of ["cpu", "memory", "gpus"]) has[name] = nodes.some((n) => n[name] !== undefined);
      say(heading, count(nodes.length, "node"));
      const unseen = nodes.filter((n) => n.gpus_hidden);
      say(hidden, unseen.length ? `GPUs of ${count(unseen.length, "node")} are not shown: ${unseen[0].gpus_hidden}` : "");
      hidden.hidden = unseen.length === 0;
      arrange();
      panel.refresh(run_, live);
    }
    none.hidden = order.length > 0;
    say(none, Object.keys(run_.nodes).length ? "No node has this name or state." : "No nodes in the run.");
    tick(live);
  }

  function tick(live) {
    for (const row of rows.values()) row.tick(live.now, shownRun.lease);
  }

  scroller.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  filter.addEventListener("input", () => { arrange(); none.hidden = order.length > 0; });
  return { element, update, tick, close: panel.close };
}

function nodeRow(id, panel) {
  const cells = {};
  const button = h("button", { type: "button", class: "node-name" });
  button.addEventListener("click", () => panel.open(id));
  const element = h("tr", {}, COLUMNS.map((column) => (cells[column.name] = h("td", { class: `${column.kind ?? ""} c-${column.name}` }))));
  cells.node.append(button);
  const left = h("span");
  const fill = h("span", { class: "bar-fill" });
  cells.lease.append(left, h("span", { class: "bar-track", "aria-hidden": "true" }, fill));
  element.addEventListener("click", (event) => {
    if (!event.target.closest("button") && !getSelection().toString()) panel.open(id);
  });
  let shownNode = null;
  let step;
  let lease = null;
  return {
    element,
    update(node, name, run) {
      if (node === shownNode && step === run.step) return;
      const before = shownNode;
      shownNode = node;
      step = run.step;
      say(button, name);
      button.title = node.host ? `${id} on ${node.host}` : id;
      for (const column of COLUMNS) if (column.text) say(cells[column.name], column.text(node, run));
      if (before?.state !== node.state) cells.state.replaceChildren(badge(node.state));
      element.classList.toggle("wrong", Boolean(node.problems));
      element.title = node.problems?.join("\n") ?? "";
      if (before?.gpus !== node.gpus) showGpus(cells.gpus, node.gpus ?? []);
    },
    tick(now, whole) {
      const rest = Math.max(0, shownNode.until - now);
      say(left, `${rest.toFixed(1)} s`);
      const share = `${Math.round(100 * Math.min(1, rest / whole))}%`;
      if (share !== lease) fill.style.width = lease = share;
      fill.classList.toggle("low", rest < whole / 3);
    },
  };
}

function showGpus(cell, gpus) {
  const bars = gpus.map(([use, , , , bad]) => {
    const fill = h("span");
    fill.style.height = `${use < 0 ? 0 : Math.max(4, use)}%`;
    return h("span", { class: bad ? "gpu bad" : "gpu" }, bad ? "!" : fill);
  });
  const used = gpus.map((gpu) => gpu[0]).filter((use) => use >= 0);
  const heat = Math.max(-1, ...gpus.map((gpu) => gpu[3]));
  const fullest = gpus.reduce((most, gpu) => (gpu[2] > 0 && gpu[1] > most[1] ? gpu : most), [0, -1, 0, 0]);
  const range = used.length ? `${Math.min(...used)}–${Math.max(...used)} %` : "";
  const words = [count(gpus.length, "GPU"), range, fullest[1] >= 0 && `fullest ${fullest[1]} of ${fullest[2]} GiB`, heat >= 0 && `up to ${heat} °C`, gpus.some((gpu) => gpu[4]) && "errors"];
  cell.title = gpus.length ? words.filter(Boolean).join(", ") : "";
  const text = used.length ? `${Math.round(used.reduce((a, b) => a + b, 0) / used.length)} %` : "";
  cell.replaceChildren(...(gpus.length ? [h("span", { class: "gpu-bars", role: "img", "aria-label": cell.title }, bars), h("span", { class: "gpu-text" }, text)] : []));
}

// What is known of one node, beside the page.
function nodePanel(run, dialog) {
  const title = h("h2");
  const content = h("div", { class: "panel-body" });
  const close = h("button", { type: "button", class: "quiet" }, "Close");
  const links = linkRow(true);
  const drain = dialog.button("drain", () => { element.close(); return shownNode; });
  const tail = tailView(run);
  const tools = h("div", { class: "tools" }, links.element, h("span", { class: "grow" }), drain);
  const element = h("dialog", { class: "panel", "aria-labelledby": "panel-title" }, h("div", { class: "panel-head" }, title, close), tools, content, tail.element);
  title.id = "panel-title";
  close.addEventListener("click", () => element.close());
  element.addEventListener("click", (event) => { if (event.target === element) element.close(); });
  let shown = null;
  let asking = false;
  let shownRun = {};
  let clockOf = null;
  let shownNode = null;
  element.addEventListener("close", () => {
    shown = null;
    showTools(null);
  });

  async function refresh(run_ = shownRun, live = clockOf) {
    [shownRun, clockOf] = [run_, live];
    if (shown === null || asking) return;
    asking = true;
    const id = shown;
    try {
      const answer = await fetch(`/api/runs/${encodeURIComponent(run)}?node=${encodeURIComponent(id)}`);
      const node = await answer.json();
      const logs = await (await fetch(`/api/runs/${encodeURIComponent(run)}?logs`)).json();
      const own = (logs.logs ?? []).filter((log) => log.node === id);
      if (shown === id) showTools(answer.ok ? node : null);
      if (shown === id) content.replaceChildren(...(answer.ok ? nodeFacts(node, own) : [h("p", {}, "The node is gone.")]));
    } catch (error) {
      content.replaceChildren(h("p", {}, `Could not be read: ${error.message}`));
    } finally {
      asking = false;
      if (shown !== id) refresh(); // another node was opened meanwhile
    }
  }

  // What can be done with a node: outside of what is read again and again, so that nothing goes from under the mouse.
  function showTools(node) {
    shownNode = node;
    drain.hidden = !shownRun.actions || !node?.agent || Boolean(node.draining);
    links.update(shownRun.links, node ? { run, node: node.id, host: node.host || node.name, ...span(shownRun, clockOf) } : {});
    tools.hidden = drain.hidden && links.element.hidden;
    tail.update(node);
  }

  function open(id) {
    shown = id;
    say(title, id.replace(/-\d+-[0-9a-f]{12}$/, ""));
    content.replaceChildren();
    showTools(null);
    element.showModal();
    refresh();
  }

  return { element, open, refresh, close: () => element.close() };
}

const gib = (bytes) => (bytes === null || bytes === undefined ? "–" : `${(bytes / 2 ** 30).toFixed(1)} GiB`);
const orDash = (value, unit = "") => (value === null || value === undefined ? "–" : `${number(value)}${unit}`);

function nodeFacts(node, logs) {
  const facts = [["State", node.draining ? `${node.state}: ${node.draining}` : node.state], ["Rank", orDash(node.rank)], ["Id", node.id], ["Host", node.host || "–"],
    ["Process", node.pid ?? "–"], ["Heard", `${duration(node.heard)} ago`], ["Restarts", orDash(node.restarts)],
    ["CPU", orDash(node.cpu && Math.round(node.cpu), " % of one core")], ["Memory", `${gib(node.memory)}, of the host's ${gib(node.memory_total)}`]];
  const parts = [];
  if (node.problems.length) parts.push(h("ul", { class: "problems" }, node.problems.map((text) => h("li", {}, badge("failed", ""), h("span", {}, text)))));
  parts.push(h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))])));
  if (node.workers.length) parts.push(sheet("Workers", ["Local", "Rank", "PID", "State", "Step", "Idle", "CPU", "Memory"],
    node.workers.map((w) => [orDash(w.local_rank), orDash(w.rank), w.pid ?? "–", w.state ?? "–", orDash(w.step), w.idle === null ? "–" : duration(w.idle), orDash(w.cpu && Math.round(w.cpu), " %"), gib(w.memory)])));
  if (node.gpus.length) parts.push(sheet("GPUs", ["GPU", "Model", "Use", "Memory", "Heat", "Errors"],
    node.gpus.map((g) => [orDash(g.index), g.lost ? "lost: gone from the bus" : (g.name ?? "–"), orDash(g.utilization, " %"), `${gib(g.memory_used)} of ${gib(g.memory_total)}`, orDash(g.temperature, " °C"),
      [g.ecc && `${g.ecc} ECC`, g.xid && `${g.xid} Xid`].filter(Boolean).join(", ") || "none"])));
  if (logs.length) parts.push(sheet("Logs on this node", ["Rank", "File"], logs.map((log) => [log.rank, log.path])));
  return parts;
}

function sheet(title, heads, rows) {
  return h("div", {}, h("h3", {}, title), h("div", { class: "sheet" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, String(cell)))))))));
}
