// The models that are served, what else is on this machine, and what is on its way to it.

import { ask, get, jsonLines } from "./api.js";
import { meter } from "./charts.js";
import { $, bytes, count, empty, h, pairs, refill, seconds, short, whileSeen, words } from "./dom.js";
import { isBusy, progressBar, stateWords } from "./serving.js";

const AT_WORK_MS = 1000;
const IDLE_MS = 4000;

/** By name: what was asked for and not answered, and what went wrong. */
const asked = new Map();
const problems = new Map();
/** The last line of each download that this page watches. */
const pulls = new Map();

/** Checkpoints on this machine; null before they are asked for. */
let local = null;
/** Whether the key is not known to be no admin's. */
let mayChange = true;

const look = whileSeen("models", refresh);

export function showModels() {
  local = null;
  look();
}

async function refresh() {
  try {
    const { data } = await get("v1/models");
    const told = mayChange && (await get("v1/status").catch(refused));
    draw(data, told?.models ?? data.map(({ id, ...one }) => ({ name: id, ...one })));
    if (told && !local) readLocal();
    return asked.size || data.some(({ state }) => isBusy(state)) ? AT_WORK_MS : IDLE_MS;
  } catch (error) {
    $("models").replaceChildren(empty("The models can’t be shown", error.message));
    return error.status === 401 ? null : IDLE_MS;
  }
}

function refused(error) {
  if (error.status !== 403) throw error;
  mayChange = false;
}

async function readLocal() {
  const told = await get("v1/checkpoints").catch(() => null); // it is asked again with the next look
  if (!told) return;
  local = told.checkpoints;
  for (const { model } of told.pulls) watchPull(model);
  drawLocal();
}

function draw(data, models) {
  const root = $("models");
  if (!root.querySelector("#served"))
    root.replaceChildren(
      h("div.cards.one", { id: "served" }),
      h("section.card", { id: "local", hidden: true }),
      mayChange ? h("section.card", hubForm(), h("ul.rows", { id: "pulls", "aria-label": "Downloads" })) : "",
      mayChange ? "" : h("p.muted.small", "To load and unload models, use a key with admin = true."),
    );
  const sum = (field) => models.reduce((total, model) => total + (model[field] ?? 0), 0);
  if (models.length > 1 && sum("limit_bytes") && !models.some(({ state }) => isBusy(state)))
    $("models-held").textContent = `${bytes(sum("memory_bytes"))} of ${bytes(sum("limit_bytes"))} held`;
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
  drawLocal();
}

function newCard(name) {
  const card = h("section.card.model", { "data-name": name, "aria-label": name }, h("div"), h("details"));
  $("served").append(card);
  return card;
}

function headOf(told) {
  const { name, state, progress, memory_bytes: held, limit_bytes: limit, expires_at: end } = told;
  const error = told.error ?? problems.get(name);
  const memory = held && `${bytes(held)} of ${bytes(limit)}`;
  const about = [
    memory,
    end && `unloads in ${seconds(Math.max(1, Math.round(end - Date.now() / 1000)))} if unused`,
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
    error && !progress && h("p.error", error),
    mayChange && actions(told),
  ];
}

function actions({ name, state, pinned, error }) {
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
    state === "ready" && button("clear", "Clear caches", name, () => clear(name), { waits }),
    why && h("span.muted.small", { id: why }, "Pinned: always loaded."),
  );
}

/** One that `waits` does nothing, but keeps the focus. */
function button(id, label, name, act, { waits, ...more } = {}) {
  return h(
    "button",
    {
      class: "quiet small",
      "data-id": `${id} ${name}`,
      "aria-label": `${label}: ${name}`,
      "aria-disabled": waits ? "true" : null,
      onclick: () => waits || act(),
      ...more,
    },
    label,
  );
}

async function change(name, route) {
  asked.set(name, route);
  problems.delete(name);
  look();
  try {
    await ask(route, { body: { model: name } });
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
const POINTS = { pixels: "pixels of the picture as seen", thousandths: "0 to 1000 on both axes" };

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
    ["Weights", quantization],
    ["Context", `${count(context)} tokens`],
    ["Coordinates", POINTS[coordinates] ?? "see its model card"],
    ["Pictures in a request", `up to ${count(limits.max_images)}`],
    ["A picture’s file", `up to ${bytes(limits.max_image_bytes)}`],
    ["A picture’s size", `up to ${count(limits.max_image_pixels / 1e6)} megapixels`],
  ];
  const { seen } = limits;
  if (seen)
    shown.push([
      "Seen as",
      `${short(seen.min_pixels)} to ${short(seen.max_pixels)} pixels, sides multiples of ${seen.side_multiple}`,
    ]);
  return shown;
}

function drawLocal() {
  if (!local || !$("local")) return;
  const served = [...$("served").children].map(({ dataset }) => dataset.name);
  const others = local.filter((one) => !one.served && !served.includes(one.name) && !pulls.has(one.name));
  $("local").hidden = !others.length;
  refill($("local"), [
    h("header", h("h2", "On this machine"), h("p", "Not served yet")),
    h("ul.rows", others.map(checkpoint)),
  ]);
  if (!$("pulls")) return;
  refill($("pulls"), [...pulls.values()].map(pullRow));
}

function checkpoint({ name, place, complete, bytes: size, needed_bytes: needed, fits }) {
  const resumes = !complete && place === "hub cache";
  const fit = { true: "fits", false: `too large: needs about ${bytes(needed)}` }[fits];
  const about = [size && bytes(size), place, complete ? fit : "not complete"];
  const problem = problems.get(name);
  return h(
    "li",
    h(
      "div",
      h("b", name),
      h("p.muted.small", about.filter(Boolean).join(" · ")),
      problem && h("p.problem", { role: "alert" }, problem),
    ),
    complete
      ? button("serve", "Serve", name, () => change(name, "v1/models/load"), { waits: asked.has(name) })
      : resumes && button("resume", "Resume", name, () => watchPull(name)),
  );
}

function hubForm() {
  const field = h("input", {
    id: "hub-name",
    required: true,
    pattern: "[^\\s\\/@]+/[^\\s\\/]+",
    placeholder: "mlx-community/Qwen3-VL-4B-Instruct-4bit",
    autocomplete: "off",
    autocapitalize: "none",
    spellcheck: "false",
  });
  const send = (event) => {
    event.preventDefault();
    watchPull(field.value.trim());
    field.value = "";
  };
  return h(
    "form",
    { onsubmit: send },
    h("h2", "Get a model"),
    h("label.muted.small", { for: "hub-name" }, "Its name on the hub, as in ORG/NAME"),
    h("p.row", field, h("button.primary", "Download")),
  );
}

/** Starts a download, or watches the one that is under way. */
async function watchPull(name) {
  if (pulls.get(name)?.state === "downloading") return;
  const tell = (news) => {
    pulls.set(name, { ...news, model: name });
    drawLocal();
  };
  tell({ state: "downloading" });
  try {
    for await (const news of jsonLines(await ask("v1/models/pull", { body: { model: name } }))) tell(news);
  } catch (error) {
    tell({ state: "failed", error: error.message });
  }
  if (pulls.get(name).state !== "failed") pulls.delete(name);
  await readLocal();
}

function pullRow({ model, state, error, bytes: done = 0, total_bytes: total }) {
  const close = () => {
    pulls.delete(model);
    drawLocal();
  };
  const cancel = () => ask("v1/models/pull/cancel", { body: { model } }).catch(() => null);
  const stage = total ? "downloading" : "asking the hub";
  return h(
    "li",
    h(
      "div",
      h("b", model),
      state === "failed"
        ? h("p.problem", { role: "alert" }, error)
        : progressBar({ stage, fraction: total ? done / total : 0, bytes: done, total_bytes: total }),
    ),
    state === "failed" ? button("close", "Close", model, close) : button("cancel", "Cancel", model, cancel),
  );
}
