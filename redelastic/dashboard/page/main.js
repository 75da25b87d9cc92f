// The page's frame: which view is shown, whether it is up to date, and its colours.

import { clock, say } from "./dom.js";
import { Live } from "./live.js";
import { runsView } from "./runs.js";
import { runView } from "./run.js";

const $ = (id) => document.getElementById(id);
let live = null;
let view = null;
let connected = true;
let away = "";
let seenAt = null;

function show() {
  live?.close();
  view?.close?.();
  const found = /^\/runs\/(.+)$/.exec(location.pathname);
  const run = found ? decodeURIComponent(found[1]) : null;
  document.title = run === null ? "redelastic" : `${run} · redelastic`;
  say($("crumb"), run ?? "");
  $("crumb").hidden = run === null;
  $("main").replaceChildren();
  connected = true;
  away = "";
  seenAt = null;
  let made;
  live = new Live(run, (document_) => {
    say($("server"), document_.server);
    if (!document_.trouble) seenAt = live.now;
    if (made === undefined && (!document_.trouble || document_.runs || document_.phase)) {
      made = run === null ? runsView(open) : runView(run);
      view = made;
      $("main").replaceChildren(made.element);
    }
    made?.update(document_, live);
    state();
  }, (up, refused = false) => {
    connected = up;
    away = refused ? "The dashboard's server refuses this page; reload it, or go back to all runs." : "";
    state();
  });
  state();
}

// Says whether what is shown is up to date, in one word and, if it is not, in a sentence.
function state() {
  const trouble = live?.document?.trouble;
  const since = seenAt === null ? "" : ` What you see is from ${clock(seenAt)}.`;
  let words = "";
  if (away) words = away;
  else if (!connected) words = `The dashboard's server does not respond.${since} Retrying.`;
  else if (trouble) words = `${trouble}${since} Retrying.`;
  say($("banner"), words);
  $("banner").hidden = words === "";
  const word = words ? "away" : live?.document ? "live" : "wait";
  if ($("live").dataset.state !== word) $("live").dataset.state = word;
  say($("live"), { away: "Away", live: "Live", wait: "Connecting" }[word]);
  document.body.classList.toggle("stale", word === "away");
}

function open(path) {
  history.pushState(null, "", path);
  show();
  $("main").focus({ preventScroll: true });
  scrollTo(0, 0);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='/']");
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  open(link.getAttribute("href"));
});
addEventListener("popstate", show);
setInterval(() => live?.document && document.visibilityState === "visible" && view?.tick?.(live), 1000);

const themes = ["auto", "light", "dark"];
function theme(name) {
  document.documentElement.dataset.theme = name;
  say($("theme"), { auto: "Auto", light: "Light", dark: "Dark" }[name]);
}
function stored() {
  try {
    const found = localStorage.getItem("theme");
    return themes.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}
$("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
  theme(next);
  try {
    localStorage.setItem("theme", next);
  } catch { /* it holds for this page, then */ }
});
theme(stored());
show();
