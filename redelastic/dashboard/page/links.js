// Addresses elsewhere, made of the templates that the dashboard was started with.

import { h } from "./dom.js";

const OF_NODE = /\{(host|node)\}/;

// A run's time, as links need it: in ms since 1970.
export function span(run, live) {
  return { start: Math.round(1000 * (run.since ?? live.now)), end: Math.round(1000 * (run.until ?? live.now)) };
}

// ofNode: whether it is a node's links, or a run's.
export function linkRow(ofNode) {
  const element = h("span", { class: "links" });
  let shown = null;
  let links = [];

  // templates: [name, address] each; values: by place. The links stay what they are: only their addresses change.
  function update(templates, values) {
    if (shown !== templates) {
      shown = templates;
      links = (templates ?? []).filter(([, address]) => OF_NODE.test(address) === ofNode)
        .map(([name, address]) => [address, h("a", { target: "_blank", rel: "noreferrer" }, `${name} ↗`)]);
      element.replaceChildren(...links.map(([, link]) => link));
    }
    for (const [address, link] of links) link.setAttribute("href", address.replace(/\{(\w+)\}/g, (_, place) => encodeURIComponent(values[place] ?? "")));
    element.hidden = links.length === 0;
  }

  return { element, update };
}
