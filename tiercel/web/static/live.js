"use strict";
// Loads the parts of the page, which the server draws, and loads them again when a run has changed.

const KINDS = { curves: ["metrics", "rest"], heldout: ["groups"], ranks: ["ranks", "metrics"], details: ["rest"], compare: ["metrics"], row: ["groups"] };
const NEAR_TOP = 240; // pixels
const RETRY = 1500; // milliseconds

let loading = null; // the AbortController of what is being loaded
let after = ""; // the last group that the page has
let refreshTimer = 0;

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

show = async (isOther) => {
  if (!state.run && $("run").options.length) state.run = $("run").value;
  if (state.run) $("run").value = state.run;
  document.title = `${state.run || "tiercel"} · tiercel view`;
  $("pill").hidden = true;
  if (state.measure) {
    addMeasures([state.measure]);
    form.elements.measure.value = state.measure;
  }
  if (isOther) {
    view.replaceChildren();
    texts.delete(view);
  }
  loadStatus();
  await load();
};

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
  highlight();
  texts.delete(view);
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

// Comparison

async function loadComparison(signal) {
  const names = [...$("run").options].map((option) => option.value);
  // the page compares eight: the box of a ninth does not stay ticked
  const chosen = (state.runs ? state.runs.split("\n") : names).filter((name) => names.includes(name)).slice(0, 8);
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
  document.querySelector("nav [data-tab=compare]").hidden = $("run").options.length < 2;
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

async function toTop() {
  document.activeElement?.blur();
  scrollTo(0, 0);
  $("pill").hidden = true;
  await load();
}

moreKeys = {
  g: toTop,
  Enter: () => document.activeElement?.closest?.(".item")?.querySelector(".to-row").click(),
};
$("run").addEventListener("change", () => go({ run: $("run").value, id: "", row: "", steps: "" }));
$("pill").addEventListener("click", toTop);
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
  if (!event.target.matches("#picker input")) return;
  const chosen = [...$("picker").querySelectorAll("input:checked")].map((box) => box.value);
  go({ runs: chosen.join("\n") }, true);
});
document.addEventListener("DOMContentLoaded", connect);
