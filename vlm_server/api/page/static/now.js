// What the server does now, from /v1/status: requests, memory, waits, caches, restarts.

import { ask, get } from "./api.js";
import { countOf, histogram, memoryChart, meter } from "./charts.js";
import { $, bytes, count, empty, h, percent, seconds, short, words } from "./dom.js";

const EVERY_MS = 1000;
const HOUR = 3600;

const STATES = {
  reading: "Reading the request",
  sent: "On its way",
  waiting: "Waiting",
  preparing: "Preparing",
  waiting_for_memory: "Waiting for memory",
  loading: "Reading the disk cache",
  encoding: "Looking at pictures",
  prefill: "Reading the prompt",
  decode: "Answering",
};
const CLEARS = {
  clear_idle: "idle",
  clear_guard: "before a picture",
  clear_admission: "before a request",
  clear_chunk: "between chunks",
  clear_prefill: "after a prompt",
  clear_decode: "long answer",
  clear_failure: "out of memory",
};
const CACHES = { prefix: "Prompts", encoder: "Encoded pictures", pixel: "Pixels", token_layout: "Layouts", disk: "Disk" };

let timer = null;
const cancelled = new Set();

export function startNow() {
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : resume()));
}

export function showNow(isShown) {
  stop();
  if (isShown) refresh();
}

function stop() {
  clearTimeout(timer);
  timer = null;
}

const resume = () => !$("now").closest(".view").hidden && !timer && refresh();

async function refresh() {
  let pause = EVERY_MS;
  try {
    draw(await get("v1/status"));
  } catch (error) {
    pause = 5 * EVERY_MS;
    const text = error.status === 403 ? "Your key may ask questions, but not see this. Use one with admin = true." : error.message;
    $("now").replaceChildren(empty("Nothing to show", text));
    if (error.status === 401 || error.status === 403) return;
  }
  stop();
  if (!document.hidden && !$("now").closest(".view").hidden) timer = setTimeout(refresh, pause);
}

/** Cards are made once and filled again, so that nothing jumps and the focus stays. */
function draw(status) {
  const root = $("now");
  if (!root.querySelector(".cards"))
    root.replaceChildren(h("div", { class: "cards" }, ["requests", "memory", "first", "between", "caches", "engine"].map((name) => h("section", { class: `card ${name}` }))));
  const stats = status.engine.stats;
  put("requests", "Requests", `${status.requests.in_flight} of ${status.requests.limit} places`, requests(status.requests.list));
  put("memory", "Memory", stats ? `${bytes(stats.memory.active_bytes)} in use` : "", memory(status, stats));
  const { time_to_first_token_seconds: first, inter_token_latency_seconds: between } = status.latencies;
  put("first", "Time to first token", countOf(first) ? `${count(countOf(first))} answers` : "", waits(first, "Time to first token", "Ask something, and it shows here."));
  put("between", "Between tokens", countOf(between) ? `${count(countOf(between))} tokens` : "", waits(between, "Time between tokens", "Appears with the second token."));
  put("caches", "Caches", stats?.prompt_tokens ? `${percent(stats.cached_tokens, stats.prompt_tokens)} of prompt tokens` : "", caches(stats));
  put("engine", "Engine", words(status.engine.state), engine(status, stats));
}

function put(name, title, aside, content) {
  const card = document.querySelector(`#now .${name}`);
  const signature = JSON.stringify([aside, content.key]);
  if (card.dataset.key === signature && content.key !== undefined) return;
  card.dataset.key = signature;
  const focused = card.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  card.replaceChildren(h("header", {}, h("h2", {}, title), h("p", {}, aside)), ...content.elements);
  if (focused) card.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

function requests(list) {
  if (!list.length) return { key: "none", elements: [empty("Nothing is running", "Requests show here while they are answered.")] };
  return { elements: [h("ul", { class: "rows" }, list.map(request))] };
}

function request({ id, route, key, state, done, total, images, videos, seconds: age }) {
  const media = [images && `${images} ${images === 1 ? "picture" : "pictures"}`, videos && `${videos} ${videos === 1 ? "video" : "videos"}`];
  const about = [key, route, ...media, seconds(age)].filter(Boolean).join(" · ");
  const isCancelled = cancelled.has(id);
  const progress = total ? `${count(done)} of ${state === "decode" ? "at most " : ""}${count(total)} tokens` : "";
  return h(
    "li",
    {},
    h("div", {}, h("p", {}, h("b", {}, STATES[state] ?? words(state)), " ", h("span", { class: "muted" }, progress)), h("p", { class: "muted small" }, about), meter(total ? done / total : 0, progress || "Not begun")),
    h("button", { type: "button", class: "quiet small", disabled: isCancelled, "data-id": id, "aria-label": `Cancel the request of ${seconds(age)} ago`, onclick: () => cancel(id) }, isCancelled ? "Cancelling" : "Cancel"),
  );
}

async function cancel(id) {
  cancelled.add(id);
  try {
    await ask(`v1/requests/${encodeURIComponent(id)}/cancel`, { method: "POST" });
  } catch {
    cancelled.delete(id); // it has ended meanwhile, or stays: the next reading shows which
  }
  stop();
  refresh();
}

function memory(status, stats) {
  if (!stats) return { key: "none", elements: [empty("No figures yet", "The engine tells them once it runs.")] };
  const { memory: now } = stats;
  const samples = status.engine.memory_samples;
  const known = samples.length ? status.time - samples[0].at : 0;
  const span = Math.min(HOUR, Math.max(300, known));
  const chart = memoryChart(samples.filter(({ at }) => at <= status.time), {
    now: status.time,
    span,
    limit: now.limit_bytes,
    series: [["footprint_bytes", "footprint"], ["active_bytes", "active"]],
    label: `Memory over the last ${seconds(span)}: ${bytes(now.active_bytes)} in use by arrays, ${bytes(now.footprint_bytes)} for the whole process, ${bytes(now.limit_bytes)} allowed`,
    ticks: [`${seconds(span)} ago`, "now"],
  });
  const figures = [
    ["In use", now.active_bytes, "active"],
    ["Whole process", now.footprint_bytes, "footprint"],
    ["Weights", now.baseline_bytes],
    ["Highest", now.peak_bytes],
    ["Kept for reuse", now.pool_bytes],
    ["Allowed", now.limit_bytes],
  ];
  return { elements: [chart, h("dl", { class: "grid" }, figures.map(([name, value, mark]) => h("div", {}, h("dt", {}, mark && h("i", { class: `key ${mark}` }), name), h("dd", {}, bytes(value))))), clears(now)] };
}

/** What the governor did, most often first. */
function clears({ decisions, clear_seconds: spent }) {
  const kinds = Object.entries(decisions).filter(([, times]) => times).sort((a, b) => b[1] - a[1]);
  const isClear = ([kind]) => kind.startsWith("clear_");
  const cleared = kinds.filter(isClear);
  const times = cleared.reduce((sum, [, each]) => sum + each, 0);
  const others = { evict: "cache entries dropped", wait: "requests that waited", refuse: "requests refused" };
  return h(
    "div",
    { class: "sub" },
    h("h3", {}, "Cleared"),
    times
      ? h("ul", { class: "tally" }, cleared.map(([kind, each]) => h("li", {}, h("span", {}, CLEARS[kind] ?? words(kind.slice(6))), meter(each / times, `${each} times`), h("b", {}, count(each)))))
      : h("p", { class: "muted" }, "Not once since the engine’s start."),
    times ? h("p", { class: "muted small" }, `${seconds(spent)} in all`) : null,
    h("p", { class: "muted small" }, kinds.filter((each) => !isClear(each)).map(([kind, each]) => `${count(each)} ${others[kind] ?? words(kind)}`).join(" · ")),
  );
}

function waits(told, name, hint) {
  const total = countOf(told);
  return { key: `${total}`, elements: [total ? histogram(told, name) : empty("Nothing measured yet", hint)] };
}

function caches(stats) {
  if (!stats) return { key: "none", elements: [empty("No figures yet")] };
  const rows = stats.caches.map(({ name, hits, misses, size_bytes: size, limit_bytes: limit, entries }) => {
    const all = hits + misses;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, CACHES[name] ?? words(name)),
      h("td", {}, meter(all ? hits / all : 0, `${percent(hits, all)} of ${all} look-ups found`)),
      h("td", {}, percent(hits, all)),
      h("td", { title: `${count(entries)} entries` }, limit ? `${bytes(size)} of ${bytes(limit)}` : bytes(size)),
    );
  });
  const head = h("tr", {}, h("th", { scope: "col" }, "Cache"), h("th", { scope: "col", colspan: "2" }, "Found"), h("th", { scope: "col" }, "Holds"));
  return { key: JSON.stringify(stats.caches), elements: [h("table", {}, h("thead", {}, head), h("tbody", {}, rows))] };
}

function engine({ engine: { pid, restarts, ends, quarantine, progress } }, stats) {
  const facts = [
    ["Process", pid ?? "none"],
    ["Restarts", count(restarts)],
    ["Sizes refused", count(quarantine.shapes)],
  ];
  if (stats) facts.push(["Prompt tokens", short(stats.prompt_tokens)], ["Answer tokens", short(stats.generated_tokens)], ["Tool calls", short(stats.tool_calls)]);
  const loading = progress && h("p", { class: "muted" }, `${words(progress.stage)} `, meter(progress.fraction, percent(progress.fraction, 1)));
  const history = ends.length
    ? h("ul", { class: "rows plain" }, ends.toReversed().map(({ at, reason }) => h("li", {}, h("span", {}, `It ${reason}`), h("time", { class: "muted", datetime: new Date(at * 1000).toISOString() }, new Date(at * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })))))
    : h("p", { class: "muted" }, "No engine has ended by itself since the server’s start.");
  return { key: JSON.stringify([facts, ends, progress]), elements: [loading, h("dl", { class: "grid" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))), h("div", { class: "sub" }, h("h3", {}, "Restarts, and why"), history)].filter(Boolean) };
}
