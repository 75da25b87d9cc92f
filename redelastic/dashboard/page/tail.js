// The end of a worker's log, as it grows: the server asks the node, which answers within some seconds.

import { h, say } from "./dom.js";

const INTERVAL = 1000; // ms

export function tailView(run) {
  const ranks = h("div", { class: "segments", role: "group", "aria-label": "Worker whose log is shown" });
  const path = h("p", { class: "note-line" });
  const lines = h("pre", { tabindex: 0, "aria-label": "The last lines" });
  const shown = h("div", { hidden: true }, path, lines);
  const element = h("div", { class: "tail", hidden: true }, h("h3", {}, "Live log"), ranks, shown);
  let node = null; // its id
  let known = ""; // of which workers there are buttons
  let chosen = null; // a local rank
  let timer = null;

  // found: the node as it is now; null if there is none.
  function update(found) {
    if (found?.id !== node) {
      choose(null);
      node = found?.id ?? null;
    }
    element.hidden = !found?.shares_logs || !found.workers.length;
    const workers = element.hidden ? [] : found.workers.filter((worker) => worker.local_rank !== null);
    const key = JSON.stringify([node, workers.map((worker) => [worker.local_rank, worker.rank])]);
    if (key === known) return;
    known = key;
    ranks.replaceChildren(...workers.map(({ local_rank, rank }) => h("button", { type: "button", "aria-pressed": String(local_rank === chosen), "data-rank": local_rank,
      onclick: () => choose(local_rank === chosen ? null : local_rank) }, `Rank ${rank ?? `${local_rank} of this node`}`)));
  }

  function choose(local_rank) {
    chosen = local_rank;
    clearTimeout(timer);
    for (const button of ranks.children) button.setAttribute("aria-pressed", String(Number(button.dataset.rank) === chosen));
    shown.hidden = chosen === null;
    say(path, "Asking the node…");
    say(lines, "");
    if (chosen !== null) poll(node, chosen);
  }

  async function poll(asked, local_rank) {
    let found;
    try {
      const answer = await fetch(`/api/runs/${encodeURIComponent(run)}?node=${encodeURIComponent(asked)}&tail=${local_rank}`);
      found = await answer.json();
    } catch (error) {
      found = { error: `Could not be read: ${error.message}` };
    }
    if (asked !== node || local_rank !== chosen) return;
    if (found.error) say(path, found.error);
    else if (found.lines !== null) {
      const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 4;
      say(path, found.path || "from its output, which has no file");
      say(lines, found.lines || "Nothing yet.");
      if (atEnd) lines.scrollTop = lines.scrollHeight;
    }
    timer = setTimeout(() => poll(asked, local_rank), INTERVAL);
  }

  return { element, update };
}
