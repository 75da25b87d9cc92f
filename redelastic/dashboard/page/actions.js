// What a person may have done to a run: a dialog asks for a name and a reason, then the server.

import { h, say } from "./dom.js";

const KEY = "redelastic-name"; // in this browser's storage

// action -> [its button, the dialog's title, what will happen].
const ACTIONS = {
  checkpoint: ["Save…", () => "Have all workers save?", "They go on training."],
  close: ["Close…", (run) => `Close ${run}?`, "No new round forms, and no node can join any more. Running workers may finish. A closed run cannot be reopened."],
  stop: ["Stop…", (run) => `Stop ${run}?`, "All workers are asked to save, and are then ended. A stopped run cannot be reopened."],
  drain: ["Drain…", (run, node) => `Drain ${node}?`, "All workers are asked to save, then this node ends its workers and leaves. The others go on."],
};

// The dialog for a run's actions; button(action, node()) makes a button that opens it, with the name of the node to show and its id to send.
export function actionDialog(run) {
  const title = h("h2", { id: "action-title" });
  const what = h("p", { class: "dim", id: "action-what" });
  const name = h("input", { type: "text", id: "action-name", autocomplete: "name", maxlength: 40, required: true });
  const reason = h("input", { type: "text", id: "action-reason", autocomplete: "off", maxlength: 150 });
  const said = h("p", { class: "said", role: "status" });
  const go = h("button", { type: "submit", class: "do" });
  const cancel = h("button", { type: "button", class: "quiet" }, "Cancel");
  const form = h("form", {}, title, what,
    h("label", { for: "action-name" }, "Your name"), name,
    h("label", { for: "action-reason" }, "Reason"), reason, said, h("div", { class: "buttons" }, cancel, go));
  const element = h("dialog", { class: "ask", "aria-labelledby": "action-title", "aria-describedby": "action-what" }, form);
  let asked = null;
  let opened = 0; // how often: an answer may come when the dialog asks for something else
  cancel.addEventListener("click", () => element.close());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (go.getAttribute("aria-disabled") === "true") return;
    if (asked === null) {
      element.close();
      return;
    }
    remember(name.value);
    go.setAttribute("aria-disabled", "true"); // disabled, it would lose the focus
    say(said, "Asked; waiting for the answer…");
    const mine = opened;
    const [ok, text] = await send(run, { ...asked, by: name.value, reason: reason.value });
    if (mine !== opened) return;
    said.classList.toggle("bad", !ok);
    say(said, text);
    go.removeAttribute("aria-disabled");
    if (!ok) return;
    asked = null;
    say(go, "Done");
    cancel.hidden = true;
  });

  function open(action, node) {
    const [, heading, text] = ACTIONS[action];
    opened += 1;
    go.removeAttribute("aria-disabled");
    asked = node === undefined ? { action } : { action, node: node.id };
    say(title, heading(run, node?.name));
    say(what, text);
    say(said, "");
    said.classList.remove("bad");
    say(go, ACTIONS[action][0].replace("…", ""));
    go.classList.toggle("grave", action === "stop" || action === "close");
    cancel.hidden = false;
    name.value = remembered();
    reason.value = "";
    element.showModal();
    (name.value ? reason : name).focus();
  }

  const button = (action, node) => h("button", { type: "button", class: "quiet", onclick: () => open(action, node?.()) }, ACTIONS[action][0]);
  return { element, button, close: () => element.close() };
}

async function send(run, asked) {
  try {
    const answer = await fetch(`/api/runs/${encodeURIComponent(run)}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked) });
    const found = await answer.json();
    return [answer.ok, answer.ok ? found.text : found.error];
  } catch (error) {
    return [false, `The dashboard's server did not answer: ${error.message}. What was asked may have been done: look at the events.`];
  }
}

function remember(name) {
  try {
    localStorage.setItem(KEY, name);
  } catch { /* it is typed again, then */ }
}

function remembered() {
  try {
    return localStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}
