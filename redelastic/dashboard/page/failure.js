// Why the last round failed, or the one before: what the other surfaces say in the same lines.

import { h, moment, say } from "./dom.js";

export function failureCard() {
  const title = h("h2", {});
  const lines = h("dl", { class: "reasons" });
  const element = h("section", { class: "card", "aria-label": "Why it failed", hidden: true }, h("div", { class: "card-head" }, title), lines);

  function update(failure) {
    element.hidden = failure === undefined;
    if (!failure) return;
    say(title, `Why round ${failure.round} failed, at ${moment(failure.time)}`);
    lines.replaceChildren(...failure.lines.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
  }

  return { element, update };
}
