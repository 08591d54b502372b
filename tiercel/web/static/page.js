"use strict";
// The page of one run: its parts, its keys, the search in its texts, the colours of tokens.
// State lies in the address after #: the part, the run, the filters. live.js, where it is loaded, gets what is shown
// from the server; without it the page holds all of its parts.

const FILTERS = ["folder", "order", "measure", "low", "high", "steps", "row", "text"];
const SEARCH_WAIT = 350; // milliseconds after the last key
const $ = (id) => document.getElementById(id);
const view = $("view");
const form = $("filters");
const tabs = [...document.querySelectorAll("#bar nav a")];

let state = { tab: "curves", run: "" };
let show = showInlined; // live.js has its own
let moreKeys = {}; // of live.js

function parse() {
  const [tab, query] = location.hash.slice(1).split("?");
  return { tab: tab || "curves", run: "", ...Object.fromEntries(new URLSearchParams(query || "")) };
}

function go(changes, replace = false) {
  const next = { ...state, ...changes };
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(next)) if (key !== "tab" && value) query.set(key, value);
  const hash = `#${next.tab}?${query}`;
  if (replace) {
    history.replaceState(null, "", hash);
    route();
  } else {
    location.hash = hash;
  }
}

async function route() {
  if (/^#[a-z]+$/.test(location.hash)) history.replaceState(null, "", `${location.hash}?`); // or the browser scrolls to it
  const before = state;
  state = parse();
  for (const link of tabs) link.classList.toggle("here", link.dataset.tab === (state.tab === "row" ? "rollouts" : state.tab));
  const here = document.querySelector("#bar nav .here");
  if (here) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.clientWidth / 3;
  form.hidden = state.tab !== "rollouts";
  for (const field of form.querySelectorAll("[name]")) {
    if (document.activeElement === field) continue;
    field.value = state[field.name] || (field.tagName === "SELECT" ? field.options[0].value : "");
  }
  const isOther = before.tab !== state.tab || before.run !== state.run || before.id !== state.id;
  if (isOther) scrollTo(0, 0);
  await show(isOther);
}

// Of the parts in the page, show the one that is wanted, and of its groups those that have the text.
function showInlined() {
  const parts = [...view.querySelectorAll(".tab")];
  const wanted = parts.find((part) => part.dataset.tab === state.tab) || parts[0];
  for (const part of parts) part.classList.toggle("away", part !== wanted);
  const text = (state.text || "").toLowerCase();
  const all = items();
  const hits = all.filter((item) => item.textContent.toLowerCase().includes(text));
  for (const item of all) item.classList.toggle("away", !hits.includes(item));
  if (text) for (const step of view.querySelectorAll("details.step")) step.open = Boolean(step.querySelector(".item:not(.away)"));
  $("found").textContent = text ? `${hits.length} of the ${all.length} groups on this page` : "";
  highlight();
}

// What the page needs in a part once it is there.
function enliven(root) {
  for (const figure of root.querySelectorAll("figure[data-chart]")) drawChart(figure);
  for (const row of root.querySelectorAll("tr[data-box]")) {
    const boxes = row.closest(".card").querySelectorAll("g[data-box]");
    const light = (on) => {
      row.classList.toggle("lit", on);
      for (const box of boxes) box.classList.toggle("dimmed", on && box.dataset.box !== row.dataset.box);
    };
    row.addEventListener("pointerenter", () => light(true));
    row.addEventListener("pointerleave", () => light(false));
  }
  colour();
}

// Mark the text that was searched for, and bring it into sight where a text is longer than its box.
function highlight() {
  if (!CSS.highlights) return;
  const found = new Highlight();
  const wanted = (state.text || "").toLowerCase();
  const walker = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node && wanted; node = walker.nextNode()) {
    const at = node.data.toLowerCase().indexOf(wanted);
    if (at < 0) continue;
    const range = new Range();
    range.setStart(node, at);
    range.setEnd(node, Math.min(at + wanted.length, node.length));
    found.add(range);
    const box = node.parentElement.closest("pre.said");
    if (box) box.scrollTop += range.getBoundingClientRect().top - box.getBoundingClientRect().top - 20;
  }
  CSS.highlights.set("found", found);
}

// Colours of tokens: one choice for all cards, kept for the next visit where the browser allows that.
let chosenColour = view.dataset.colour;
try {
  chosenColour = localStorage.getItem("colour") || chosenColour;
} catch {} // of a file, some browsers keep nothing

function colour(chosen = chosenColour) {
  chosenColour = chosen;
  view.dataset.colour = chosen;
  for (const select of view.querySelectorAll("select.colours")) {
    select.value = [...select.options].some((option) => option.value === chosen) ? chosen : "plain";
  }
}

function chooseColour(chosen) {
  colour(chosen);
  try {
    localStorage.setItem("colour", chosen);
  } catch {}
}

function nextColour() {
  const select = view.querySelector("select.colours");
  if (select) chooseColour(select.options[(select.selectedIndex + 1) % select.options.length].value);
}

// What the reader does

function filtered() {
  const fields = [...form.querySelectorAll("[name]")];
  const changes = Object.fromEntries(fields.map((field) => [field.name, field.value.trim()]));
  for (const name of ["folder", "order", "measure"]) if (form.elements[name]?.selectedIndex === 0) changes[name] = "";
  go(changes, true);
}

function clear() {
  document.activeElement?.blur();
  go(Object.fromEntries(FILTERS.map((name) => [name, ""])));
}

function items() {
  return [...view.querySelectorAll(".item")];
}

function move(choose) {
  const all = items().filter((item) => item.checkVisibility());
  const next = all[choose(all, all.indexOf(document.activeElement?.closest?.(".item")))];
  if (!next) return;
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "start" });
}

function nextStep(all, now) {
  return now < 0 ? 0 : all.findIndex((item, at) => at > now && item.dataset.step !== all[now].dataset.step);
}

function stepBefore(all, now) {
  let at = now;
  while (at > 0 && all[at].dataset.step === all[now].dataset.step) at -= 1;
  const step = all[Math.max(at, 0)]?.dataset.step;
  return all.findIndex((item) => item.dataset.step === step);
}

const MOVES = {
  j: () => move((all, now) => Math.min(now + 1, all.length - 1)),
  k: () => move((all, now) => Math.max(now - 1, 0)),
  n: () => move(nextStep),
  p: () => move(stepBefore),
  c: nextColour,
  g: () => scrollTo(0, 0),
  "?": () => $("help").showModal(),
  "/": () => {
    if (state.tab !== "rollouts") go({ tab: "rollouts", id: "" });
    setTimeout(() => form.elements.text.focus(), 30);
  },
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.key === "Escape") {
    if (event.target.matches("input, select")) event.target.blur();
    else if (state.tab === "rollouts") clear();
    return;
  }
  if (event.target.matches("input, select, textarea, button, a, summary") && (event.key === "Enter" || !event.target.matches("button, a, summary"))) return;
  const tab = /^[1-9]$/.test(event.key) && tabs[event.key - 1]?.dataset.tab;
  const action = tab ? () => go({ tab, id: "" }) : moreKeys[event.key] || MOVES[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

document.querySelector("#bar nav").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();
  go({ tab: link.dataset.tab, id: "" });
});
$("open-help").addEventListener("click", () => $("help").showModal());
$("clear").addEventListener("click", clear);
$("more-filters").addEventListener("click", () => {
  $("more-filters").setAttribute("aria-expanded", form.classList.toggle("open"));
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => {
  clearTimeout(form.timer);
  form.timer = setTimeout(filtered, event.target.tagName === "SELECT" ? 0 : SEARCH_WAIT);
});
view.addEventListener("change", (event) => {
  if (event.target.matches("select.colours")) chooseColour(event.target.value);
});
addEventListener("beforeprint", () => {
  for (const step of document.querySelectorAll("details.step")) step.open = true;
});
addEventListener("hashchange", route);
document.addEventListener("DOMContentLoaded", () => {
  enliven(view);
  route();
});
