// The models that are served: their state, how long they stay, and what they can do.

import { ask, get } from "./api.js";
import { meter } from "./charts.js";
import { $, button, count, empty, h, inline, memorySize, pairs, refill, seconds, short, whileSeen, words } from "./dom.js";
import { drawHub, forgetLocal, hubCards, readLocal } from "./hub.js";
import { isBusy, progressBar, stateWords } from "./serving.js";

export { showCatalog } from "./hub.js";

const AT_WORK_MS = 1000;
const IDLE_MS = 4000;

/** By name: what was asked for and not answered, and what went wrong. */
const asked = new Map();
const problems = new Map();
/** Whether the key is not known to be no admin's. */
let mayChange = true;

const look = whileSeen("models", refresh);

export function showModels() {
  forgetLocal();
  look();
}

async function refresh() {
  try {
    const { data } = await get("v1/models");
    const told = mayChange && (await get("v1/status").catch(refused));
    draw(data, told?.models ?? data.map(({ id, ...one }) => ({ name: id, ...one })));
    if (told) readLocal();
    return asked.size || data.some(({ state }) => isBusy(state)) ? AT_WORK_MS : IDLE_MS;
  } catch (error) {
    $("models-body").replaceChildren(empty("The models can’t be shown", error.message));
    return error.status === 401 ? null : IDLE_MS;
  }
}

function refused(error) {
  if (error.status !== 403) throw error;
  mayChange = false;
}

function draw(data, models) {
  const root = $("models-body");
  if (!root.querySelector("#served"))
    root.replaceChildren(
      h("div.cards.one", { id: "served" }),
      ...(mayChange ? hubCards({ change, asked, problems }) : []),
      mayChange ? "" : h("p.muted.small", "To load and unload models, use a key with admin = true."),
    );
  const sum = (field) => models.reduce((total, model) => total + (model[field] ?? 0), 0);
  if (models.length > 1 && sum("limit_bytes") && !models.some(({ state }) => isBusy(state)))
    $("models-held").textContent = `${memorySize(sum("memory_bytes"))} of ${memorySize(sum("limit_bytes"))} held`;
  for (const told of models) {
    const model = data.find(({ id }) => id === told.name) ?? {};
    const card =
      [...$("served").children].find((one) => one.dataset.name === told.name) ?? newCard(told.name);
    const [head, more] = card.children;
    refill(head, headOf(told));
    if (more.dataset.facts !== model.family) {
      more.dataset.facts = model.family;
      more.replaceChildren(...details(model));
      more.open = models.length === 1;
    }
    more.hidden = !model.family;
  }
  drawHub(models.map(({ name }) => name));
}

function newCard(name) {
  const card = h("section.card.model", { "data-name": name, "aria-label": name }, h("div"), h("details"));
  $("served").append(card);
  return card;
}

function headOf(told) {
  const { name, state, progress, memory_bytes: held, limit_bytes: limit, expires_at: end } = told;
  const error = told.error ?? problems.get(name);
  const memory = held && `${memorySize(held)} of ${memorySize(limit)}`;
  const about = [
    memory,
    end && `unloads in ${seconds(Math.max(1, Math.round(end - Date.now() / 1000)))} if unused`,
    state === "ready" && told.kept && "stays until you unload it",
    state === "unloaded" && !error && "loads when asked for",
  ];
  return [
    h(
      "header",
      h("h2", name),
      h("p.state", { "data-state": error && !isBusy(state) ? "failed" : state }, stateWords(state)),
    ),
    progress ? progressBar(progress) : held && meter(held / limit, memory),
    h("p.muted.small.about", about.filter(Boolean).join(" · ")),
    error && !progress && h("div.error", h("p", inline(error))),
    mayChange && actions(told),
  ];
}

function actions({ name, state, pinned, kept, error }) {
  const isLoaded = ["ready", "unresponsive", "unloading"].includes(state);
  const waits = asked.has(name) || isBusy(state);
  const verb = isLoaded ? "unload" : "load";
  const does = { load: error ? "Try again" : "Load", unload: "Unload" };
  const why = pinned && `why-${name}`;
  return h(
    "div.actions",
    button("toggle", does[verb], name, () => change(name, `v1/models/${verb}`), {
      disabled: pinned,
      waits,
      "aria-describedby": why,
    }),
    state === "ready" &&
      !pinned &&
      button("keep", kept ? "Let go when unused" : "Keep loaded", name, () => keep(name, !kept), { waits }),
    state === "ready" && button("clear", "Clear caches", name, () => clear(name), { waits }),
    why && h("span.muted.small", { id: why }, "Pinned: always loaded."),
  );
}

const USUAL_SECONDS = 300;

const keep = (name, isKept) =>
  change(name, "v1/models/load", { keep_alive_seconds: isKept ? -1 : USUAL_SECONDS });

async function change(name, route, more = {}) {
  asked.set(name, route);
  problems.delete(name);
  look();
  try {
    await ask(route, { body: { model: name, ...more } });
  } catch (error) {
    problems.set(name, error.message);
  }
  asked.delete(name);
  dispatchEvent(new Event("trouble")); // whoever shows the models looks again
  showModels();
}

async function clear(name) {
  await change(name, "v1/caches/clear");
  const pressed = document.querySelector(`[data-id="clear ${CSS.escape(name)}"]`);
  if (pressed && !problems.has(name)) pressed.textContent = "Cleared";
}

const CAN = {
  completion: "Text",
  vision: "Pictures",
  video: "Videos",
  tools: "Tools",
  thinking: "Thinking",
  structured_output: "JSON by schema",
};
const BITS = { float32: "32-bit", float16: "16-bit", bfloat16: "16-bit" };
const weights = (stored) => BITS[stored] ?? stored.replace(/^(\d+)bit$/, "$1-bit");
const POINTS = { pixels: "in pixels of the scaled picture", thousandths: "0 to 1000 across and down" };

function details(model) {
  if (!model.family) return [];
  return [
    h("summary", "Details"),
    h(
      "ul.chips",
      { "aria-label": "What it can do" },
      model.capabilities.map((name) => h("li", CAN[name] ?? words(name))),
    ),
    pairs("grid", facts(model)),
    ...(model.warnings ?? []).map((text) => h("p.note", text)),
  ];
}

function facts({
  family,
  num_parameters: parameters,
  quantization,
  max_model_len: context,
  coordinates,
  image_limits: limits,
}) {
  const shown = [
    ["Family", family],
    ["Parameters", short(parameters)],
    ["Weights", weights(quantization)],
    ["Context", `${count(context)} tokens`],
    ["Coordinates", POINTS[coordinates] ?? "see its model card"],
    ["Pictures in a request", `up to ${count(limits.max_images)}`],
    ["A picture’s file", `up to ${memorySize(limits.max_image_bytes)}`],
    ["A picture’s size", `up to ${count(limits.max_image_pixels / 1e6)} megapixels`],
  ];
  const { seen } = limits;
  if (seen)
    shown.push([
      "Pictures are scaled to",
      `${[seen.min_pixels, seen.max_pixels].map((pixels) => +(pixels / 1e6).toPrecision(2)).join(" to ")} megapixels`,
    ]);
  return shown;
}
