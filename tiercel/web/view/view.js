"use strict";
// Loads the parts of the page, which the server draws, and loads them again when a run has changed.
// State lies in the address after #: the part, the run, the filters. Nothing is drawn here but what the server gives.

const KINDS = { curves: ["metrics", "rest"], heldout: ["groups"], ranks: ["ranks", "metrics"], details: ["rest"], compare: ["metrics"], row: ["groups"] };
const FILTERS = ["folder", "order", "measure", "low", "high", "steps", "row", "text"];
const NEAR_TOP = 240; // pixels
const SEARCH_WAIT = 350; // milliseconds after the last key
const RETRY = 1500;
const $ = (id) => document.getElementById(id);
const view = $("view");
const form = $("filters");

let state = { tab: "curves", run: "" };
let loading = null; // the AbortController of what is being loaded
let after = ""; // the last group that the page has
let refreshTimer = 0;

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

async function get(path, parameters, signal) {
  const response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { signal });
  const text = await response.text();
  if (!response.ok) throw new Error(text);
  return { text, headers: response.headers };
}

// Replace the content of an element where it is another; what the reader opened stays open.
const texts = new WeakMap();
function fill(element, text) {
  if (texts.get(element) === text) return;
  const open = [...element.querySelectorAll("details")].map((each) => each.open);
  element.innerHTML = text;
  element.querySelectorAll("details").forEach((each, at) => {
    if (at < open.length) each.open = open[at];
  });
  texts.set(element, text);
  enliven(element);
}

// What takes the server longer comes after the rest, and stays until it is known again.
const later = {};
async function fillLater(signal) {
  for (const part of view.querySelectorAll("[data-part]")) {
    const key = `${state.run} ${part.dataset.part}`;
    if (later[key]) fill(part, later[key]);
    later[key] = (await get(part.dataset.part, { run: state.run }, signal)).text;
    fill(part, later[key]);
  }
}

function problem(error) {
  const said = document.createElement("p");
  said.className = "notice warning";
  said.textContent = error.message;
  view.replaceChildren(said);
}

async function route() {
  const before = state;
  state = parse();
  if (!state.run && $("run").options.length) state.run = $("run").value;
  if (state.run) $("run").value = state.run;
  for (const link of document.querySelectorAll("#bar nav a")) {
    link.classList.toggle("here", link.dataset.tab === (state.tab === "row" ? "rollouts" : state.tab));
  }
  const here = document.querySelector("#bar nav .here");
  if (here) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.clientWidth / 3;
  form.hidden = state.tab !== "rollouts";
  $("pill").hidden = true;
  for (const name of FILTERS) {
    const field = form.elements[name];
    if (document.activeElement === field) continue;
    if (name === "measure" && state.measure) addMeasures([state.measure]);
    field.value = state[name] || (field.tagName === "SELECT" ? field.options[0].value : "");
  }
  document.title = `${state.run || "tiercel"} · tiercel view`;
  const isOther = before.tab !== state.tab || before.run !== state.run || before.id !== state.id;
  if (isOther) {
    view.replaceChildren();
    texts.delete(view);
    scrollTo(0, 0);
  }
  loadStatus();
  await load();
}

async function loadStatus() {
  if (!state.run) return;
  try {
    fill($("status"), (await get("status", { run: state.run })).text);
  } catch (error) {
    $("status").textContent = error.message;
  }
}

async function load(isQuiet = false) {
  if (loading) loading.abort();
  loading = new AbortController();
  const { signal } = loading;
  view.classList.toggle("loading", !isQuiet);
  try {
    if (state.tab === "rollouts") await loadCards(signal, false);
    else if (state.tab === "compare") await loadComparison(signal);
    else if (state.run) {
      const parameters = state.tab === "row" ? { run: state.run, id: state.id || "" } : { run: state.run };
      fill(view, (await get(state.tab, parameters, signal)).text);
      view.classList.remove("loading");
      await fillLater(signal);
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error instanceof TypeError) return; // the server is away; the connection says so
    problem(error);
  }
  if (!signal.aborted) view.classList.remove("loading");
}

// Cards

function wanted() {
  return Object.fromEntries(["run", ...FILTERS].map((name) => [name, state[name] || ""]).filter(([, value]) => value));
}

async function loadCards(signal, isMore) {
  if (!state.run) return;
  const begun = performance.now();
  const blocks = [];
  let from = isMore ? after : "";
  let count = 0;
  let block;
  $("found").classList.remove("bad");
  do {
    const { text, headers } = await get("cards", { ...wanted(), ...(from ? { after: from } : {}) }, signal).catch((error) => {
      if (error.name !== "AbortError" && !(error instanceof TypeError)) {
        $("found").textContent = error.message;
        $("found").classList.add("bad");
      }
      throw error;
    });
    const made = document.createElement("template");
    made.innerHTML = text;
    block = made.content.firstElementChild;
    addMeasures(JSON.parse(headers.get("x-rewards") || "[]"));
    count += block.querySelectorAll(".item").length;
    if (block.querySelector(".item, p")) blocks.push(block);
    from = block.dataset.cursor || from;
    const known = isMore ? view.querySelectorAll(".item").length : 0;
    tellFound(block.dataset, known + count, Number(headers.get("x-unread")), performance.now() - begun);
  } while (state.text && block.dataset.isOver === "false" && count < 10);
  if (!isMore) view.replaceChildren();
  view.querySelector(".more")?.remove();
  for (const each of blocks) {
    view.append(each);
    enliven(each);
  }
  after = from;
  if (block.dataset.isOver === "false") {
    const more = document.createElement("button");
    more.type = "button";
    more.className = "more";
    more.textContent = "More";
    more.addEventListener("click", loadMore);
    view.append(more);
    observer.observe(more);
  }
  colour();
  highlight();
  texts.delete(view);
}

// Mark the text that was searched for, and bring it into sight where a text is longer than its box.
function highlight() {
  if (!CSS.highlights) return;
  const found = new Highlight();
  const wantedText = (state.text || "").toLowerCase();
  const walker = document.createTreeWalker(view, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node && wantedText; node = walker.nextNode()) {
    const at = node.data.toLowerCase().indexOf(wantedText);
    if (at < 0) continue;
    const range = new Range();
    range.setStart(node, at);
    range.setEnd(node, Math.min(at + wantedText.length, node.length));
    found.add(range);
    const box = node.parentElement.closest("pre.said");
    if (box) box.scrollTop += range.getBoundingClientRect().top - box.getBoundingClientRect().top - 20;
  }
  CSS.highlights.set("found", found);
}

function tellFound(data, count, unread, took) {
  const total = Number(data.total).toLocaleString("en");
  const parts = [];
  if (!state.text) parts.push(`${total} groups`);
  else parts.push(`${count} found`, `${Number(data.lookedAt).toLocaleString("en")} of ${total} groups searched`);
  if (unread) parts.push(`${unread.toLocaleString("en")} files without an index are still being read`);
  $("found").textContent = parts.join("; ");
  $("found").dataset.milliseconds = took.toFixed(0);
}

async function loadMore() {
  if (!loading || loading.signal.aborted) loading = new AbortController();
  view.querySelector(".more")?.remove();
  try {
    await loadCards(loading.signal, true);
  } catch (error) {
    if (error.name !== "AbortError" && !(error instanceof TypeError)) problem(error);
  }
}

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting && entry.target.isConnected) loadMore();
}, { rootMargin: "600px" });

function addMeasures(names) {
  const select = form.elements.measure;
  for (const name of names) {
    if (![...select.options].some((option) => option.value === name)) select.add(new Option(`mean of ${name}`, name));
  }
}

// Colours of tokens: one choice for all cards, kept for the next visit.

function chosenColour() {
  return localStorage.getItem("colour") || "plain";
}

function colour() {
  const chosen = chosenColour();
  view.dataset.colour = chosen;
  for (const select of view.querySelectorAll("select.colours")) {
    select.value = [...select.options].some((option) => option.value === chosen) ? chosen : "plain";
  }
}

function nextColour() {
  const select = view.querySelector("select.colours");
  if (!select) return;
  localStorage.setItem("colour", select.options[(select.selectedIndex + 1) % select.options.length].value);
  colour();
}

// Comparison

async function loadComparison(signal) {
  const names = [...$("run").options].map((option) => option.value);
  const chosen = (state.runs ? state.runs.split("\n") : names.slice(0, 8)).filter((name) => names.includes(name));
  const query = new URLSearchParams(chosen.map((name) => ["run", name]));
  const { text } = await get("compare", query, signal);
  if (!$("picker")) {
    const picker = document.createElement("div");
    picker.id = "picker";
    picker.className = "picker";
    const content = document.createElement("div");
    content.id = "compared";
    view.replaceChildren(picker, content);
  }
  if ($("picker").dataset.names !== names.join("\n")) {
    $("picker").dataset.names = names.join("\n");
    $("picker").replaceChildren(...names.map((name) => {
      const label = document.createElement("label");
      const box = document.createElement("input");
      box.type = "checkbox";
      box.value = name;
      label.append(box, name);
      return label;
    }));
  }
  for (const box of $("picker").querySelectorAll("input")) box.checked = chosen.includes(box.value);
  fill($("compared"), text);
}

// Following

function changed(event) {
  const { run, kinds } = JSON.parse(event.data);
  if (kinds.includes("runs")) loadRuns();
  const isOurs = run === state.run;
  if (isOurs && (kinds.includes("metrics") || kinds.includes("ranks"))) loadStatus();
  if (state.tab === "rollouts") {
    if (isOurs && kinds.includes("groups")) newCards();
  } else if ((isOurs || state.tab === "compare") && kinds.some((kind) => (KINDS[state.tab] || []).includes(kind))) {
    soon();
  }
}

// A part that takes long to draw is not drawn more often than it can be.
function soon() {
  if (refreshTimer) return;
  refreshTimer = setTimeout(async () => {
    refreshTimer = 0;
    if (state.tab !== "rollouts") await load(true);
  }, 120);
}

async function newCards() {
  const isReading = document.activeElement?.closest?.(".item") || scrollY > NEAR_TOP;
  const isNewest = (state.order || "newest") === "newest" && !state.text;
  if (isReading || !isNewest) {
    $("pill").hidden = Boolean(state.text);
    return;
  }
  const known = new Set([...view.querySelectorAll(".item")].map(keyOf));
  await load(true);
  for (const item of view.querySelectorAll(".item")) if (known.size && !known.has(keyOf(item))) item.classList.add("fresh");
}

function keyOf(item) {
  return `${item.dataset.step} ${item.querySelector(".to-row").dataset.row}`;
}

async function loadRuns() {
  try {
    const { text } = await get("runs", {});
    $("run").innerHTML = text;
  } catch (error) {
    return;
  }
  if ([...$("run").options].some((option) => option.value === state.run)) $("run").value = state.run;
  document.querySelector("[data-tab=compare]").hidden = $("run").options.length < 2;
}

// A hidden page holds no connection: browsers allow six to a server.
let events = null;
function connect() {
  events?.close();
  events = new EventSource("events");
  events.addEventListener("hello", async () => {
    const wasAway = $("connection").className !== "";
    tellConnection("live", "live");
    await loadRuns();
    if (!wasAway) return;
    loadStatus();
    if (items().length) await newCards();
    else await route();
  });
  events.addEventListener("change", changed);
  events.onerror = () => {
    tellConnection("lost", "the page's server does not answer; trying again");
    events.close();
    setTimeout(() => document.hidden || connect(), RETRY);
  };
}

function tellConnection(style, text) {
  $("connection").className = style;
  $("connection").textContent = text;
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return connect();
  events.close();
  tellConnection("paused", "paused");
});

// What the reader does

addEventListener("hashchange", route);
$("run").addEventListener("change", () => go({ run: $("run").value, id: "", row: "", steps: "" }));
document.querySelector("#bar nav").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link) return;
  event.preventDefault();
  go({ tab: link.dataset.tab, id: "" });
});
$("pill").addEventListener("click", () => toTop());
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

function filtered() {
  const changes = Object.fromEntries(FILTERS.map((name) => [name, form.elements[name].value.trim()]));
  for (const name of ["folder", "order", "measure"]) if (form.elements[name].selectedIndex === 0) changes[name] = "";
  go(changes, true);
}

function clear() {
  document.activeElement?.blur();
  go(Object.fromEntries(FILTERS.map((name) => [name, ""])));
}

async function toTop() {
  document.activeElement?.blur();
  scrollTo(0, 0);
  $("pill").hidden = true;
  await load();
}

view.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const { step, folder } = button.dataset;
  const row = decodeURIComponent(button.dataset.row || "");
  const none = Object.fromEntries(FILTERS.map((name) => [name, ""]));
  const there = { ...none, tab: "rollouts", id: "", steps: step, folder: folder === "rollouts" ? "" : folder };
  if (button.classList.contains("to-step")) go(there);
  if (button.classList.contains("to-group")) go({ ...there, row });
  if (button.classList.contains("to-row")) go({ tab: "row", id: row });
});
view.addEventListener("change", (event) => {
  if (event.target.matches("select.colours")) {
    localStorage.setItem("colour", event.target.value);
    colour();
  }
  if (event.target.matches("#picker input")) {
    const chosen = [...$("picker").querySelectorAll("input:checked")].map((box) => box.value);
    go({ runs: chosen.join("\n") }, true);
  }
});

function items() {
  return [...view.querySelectorAll(".item")];
}

function move(choose) {
  const all = items();
  const now = all.indexOf(document.activeElement?.closest?.(".item"));
  const next = all[choose(all, now)];
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
  g: toTop,
  "?": () => $("help").showModal(),
  "/": () => {
    if (state.tab !== "rollouts") go({ tab: "rollouts", id: "" });
    setTimeout(() => form.elements.text.focus(), 30);
  },
  Enter: () => document.activeElement?.closest?.(".item")?.querySelector(".to-row").click(),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.key === "Escape") {
    if (event.target.matches("input, select")) event.target.blur();
    else if (state.tab === "rollouts") clear();
    return;
  }
  if (event.target.matches("input, select, textarea, button, a, summary") && (event.key === "Enter" || !event.target.matches("button, a, summary"))) return;
  const tabs = [...document.querySelectorAll("#bar nav a")];
  const action = MOVES[event.key] || (/^[1-9]$/.test(event.key) && tabs[event.key - 1] && (() => go({ tab: tabs[event.key - 1].dataset.tab, id: "" })));
  if (!action) return;
  event.preventDefault();
  action();
});

route();
connect();
