// A run's events, the newest above.

import { badge, count, h, moment, number, say, whose } from "./dom.js";

// textOf(id): the text behind an event's "more", or a promise of it.
export function eventList(textOf) {
  const list = h("ol", { class: "events" });
  const none = h("p", { class: "none" }, "Nothing has happened yet.");
  const element = h("div", {}, h("div", { class: "card-head" }, h("h2", {}, "Events")), list, none);
  let rows = new Map();
  let last = null;

  function update(events) {
    if (events === last) return;
    last = events;
    const fresh = new Map();
    const ids = Object.keys(events);
    for (const id of ids) {
      const old = rows.get(id);
      fresh.set(id, old && old.event === events[id] ? old : { event: events[id], element: line(textOf, id, events[id]) });
    }
    for (const [id, row] of rows) if (fresh.get(id) !== row) row.element.remove();
    let before = null; // the newest is above
    for (const id of ids) {
      const row = fresh.get(id).element;
      if (row.nextSibling !== before || row.parentNode !== list) list.insertBefore(row, before);
      before = row;
    }
    rows = fresh;
    none.hidden = ids.length > 0;
  }

  return { element, update };
}

function line(textOf, id, event) {
  const subject = event.size ? `round ${event.round}, ${count(event.size, "node")}` : event.node === undefined ? `${number(event.count)} nodes` : whose(event);
  const text = event.count && ["started"].includes(event.event) ? "" : event.reason;
  const at = new Date(1000 * event.time);
  const row = h("li", {},
    h("time", { datetime: Number.isNaN(at.getTime()) ? null : at.toISOString() }, moment(event.time)),
    badge(event.event, event.event, event.fault),
    h("span", { class: "event-text" }, subject ? h("b", {}, subject) : "", subject && text ? " " : "", text ?? ""));
  if (event.detail) {
    const text_ = h("pre", { tabindex: 0 }, "…");
    const more = h("details", {}, h("summary", {}, event.count ? "nodes" : event.event === "hung" ? "stacks" : event.event === "log" ? "log" : "more"), text_);
    more.addEventListener("toggle", async () => {
      if (!more.open || text_.dataset.read) return;
      try {
        say(text_, await textOf(id));
        text_.dataset.read = "yes";
      } catch (error) {
        say(text_, `Could not be read: ${error.message}`);
      }
    });
    row.append(more);
  }
  return row;
}
