// Models to get: from this machine, from the catalog, from a search of the hub; and downloads.

import { ask, get, jsonLines } from "./api.js";
import { $, button, fileSize, h, inline, memorySize, refill, short } from "./dom.js";
import { progressBar } from "./serving.js";

const NAME = /^[^\s/@]+\/[^\s/@]+(@\S+)?$/;

/** The last line of each download that this page watches, by name. */
const pulls = new Map();

/** Checkpoints on this machine, and the catalog; null before they are asked for. */
let local = null;
let catalog = null;
/** {query, models, problem} of the last search; `models` is null while it runs. */
let search = null;
let served = [];
let showsAll = false;
/** What the view of models has: {change, asked, problems}. */
let view = null;

let isWanted = false;

/** Brings the models to get into sight, once they are there. */
export function showCatalog() {
  isWanted = true;
  drawHub();
}

export function forgetLocal() {
  local = null;
}

export function hubCards(models) {
  view = models;
  return [
    h(
      "section.card",
      { id: "downloads", hidden: true },
      h("header", h("h2", "Downloads"), h("p", "They go on if you close this page")),
      h("ul.rows", { id: "pulls", "aria-label": "Downloads" }),
    ),
    h("section.card", { id: "local", hidden: true }),
    h("section.card", { id: "catalog" }, hubForm(), h("div", { id: "found" })),
  ];
}

export async function readLocal() {
  if (local) return;
  const told = await get("v1/checkpoints").catch(() => null); // it is asked again with the next look
  catalog = (await get("v1/hub/catalog").catch(() => null))?.models ?? catalog;
  if (!told) return;
  local = told.checkpoints;
  for (const { model } of told.pulls) watchPull(model);
  drawHub(served);
}

/** Draws what is here and what may be had, but for the models called `names`, which are served. */
export function drawHub(names = served) {
  served = names;
  if (!local || !$("local")) return;
  const others = local.filter((one) => !one.served && !served.includes(one.name) && !pulls.has(one.name));
  $("local").hidden = !others.length;
  refill($("local"), [
    h("header", h("h2", "On this machine"), h("p", "Not served yet")),
    h("ul.rows", others.map(checkpoint)),
  ]);
  $("downloads").hidden = !pulls.size;
  refill($("pulls"), [...pulls.values()].map(pullRow));

  refill($("found"), search ? searched() : offered());
  if (!isWanted || $("catalog").closest(".view").hidden) return;
  isWanted = false;
  $("catalog").scrollIntoView();
}

const PLACES = { "hub cache": "downloaded", "search path": "in a folder of yours", folder: "in a folder" };

function checkpoint({ name, place, complete, bytes: size, needed_bytes: needed, fits }) {
  const resumes = !complete && place === "hub cache";
  const fit = { true: "fits", false: `too large: needs about ${memorySize(needed)}` }[fits];
  const [org, own] = partsOf(name);
  const about = [org, size && fileSize(size), PLACES[place] ?? place, complete ? fit : "download not finished"];
  const problem = view.problems.get(name);
  return h(
    "li",
    h(
      "div",
      h("b", { title: name }, own),
      h("p.muted.small", about.filter(Boolean).join(" · ")),
      problem && h("p.problem", { role: "alert" }, inline(problem)),
    ),
    complete
      ? button("serve", problem ? "Try again" : "Serve", name, () => view.change(name, "v1/models/load"), { waits: view.asked.has(name) })
      : resumes && button("resume", "Resume", name, () => watchPull(name)),
  );
}

function hubForm() {
  const field = h("input", {
    id: "hub-name",
    required: true,
    maxlength: 100,
    placeholder: "Qwen3-VL, or mlx-community/Qwen3-VL-4B-Instruct-4bit",
    autocomplete: "off",
    autocapitalize: "none",
    spellcheck: "false",
    oninput: () => (download.hidden = !NAME.test(field.value.trim())),
  });
  const find = (event) => {
    event.preventDefault();
    seek(field.value.trim());
  };
  const pull = () => {
    watchPull(field.value.trim());
    field.value = "";
    download.hidden = true;
    field.focus();
  };
  const download = h("button.quiet", { type: "button", hidden: true, onclick: pull }, "Download");
  return h(
    "form",
    { onsubmit: find },
    h("h2", "Get a model"),
    h("label.muted.small", { for: "hub-name" }, "Search Hugging Face by a part of the name, or enter a whole one"),
    h(
      "p.row.wraps",
      field,
      h("button.primary", "Search"),
      download,
    ),
  );
}

/** [ORG, NAME] of a whole name; ORG may be missing. */
const partsOf = (name) => name.match(/^(?:([^/]+)\/)?(.*)$/).slice(1);

async function seek(query) {
  const mine = (search = { query, models: null });
  drawHub();
  try {
    Object.assign(mine, await get(`v1/hub/search?query=${encodeURIComponent(query)}`));
  } catch (error) {
    Object.assign(mine, { models: [], problem: error.message });
  }
  if (search === mine) drawHub();
}

function searched() {
  const { query, models, problem } = search;
  const close = () => {
    search = null;
    drawHub();
    $("hub-name").focus();
  };
  const none = problem ?? (models?.length === 0 && `Hugging Face has no model called “${query}” in the format that this server reads (safetensors).`);
  return [
    h(
      "header.sub-head",
      h("h3", `On Hugging Face: “${query}”`),
      button("found", "Back to the suggestions", query, close),
    ),
    h("p", { role: "status", class: problem ? "problem" : "muted small" }, models ? inline(none || "") : "Searching"),
    models && h("ul.rows", models.map((one) => offer(one, one.weight_bytes ? fileSize(one.weight_bytes) : "", one.model_type))),
  ];
}

function offered() {
  if (!catalog) return [];
  const fitting = catalog.filter(({ fits }) => fits !== false);
  const shown = showsAll ? catalog : fitting;
  const hidden = catalog.length - fitting.length;
  const toggle = () => {
    showsAll = !showsAll;
    drawHub();
  };
  const label = showsAll ? "Only what fits" : `Show ${hidden} larger ones`;
  return [
    h("header.sub-head", h("h3", "Suggestions, the smallest first"), hidden > 0 && button("all", label, "suggestions", toggle)),
    shown.length
      ? h("ul.rows", shown.map((one) => offer(one, `about ${+(one.about_bytes / 1e9).toPrecision(2)} GB`, one.about)))
      : h("p.muted.small", "None of them fits into the memory that is left."),
    h("p.muted.small", catalog.every(({ fits }) => fits === null)
        ? "Whether they fit is known once a model is loaded. Sizes are estimates."
        : "Sizes are estimates. Whether this server can run a model is checked before its large files are downloaded."),
  ];
}

function offer({ name, fits, here, downloads, is_gated: gated, parameters }, size, about) {
  const fit = { true: "fits", false: "too large for this machine" }[fits];
  const [org, own] = partsOf(name);
  const facts = [
    org,
    size,
    parameters && `${short(parameters)} parameters`,
    fit,
    downloads && `${short(downloads)} downloads`,
    gated && "first accept its terms on huggingface.co",
    about,
  ];
  const isHere = served.includes(name) || (local.find((one) => one.name === name)?.complete ?? here);
  return h(
    "li",
    h("div", h("b", { title: name }, own), h("p.muted.small", facts.filter(Boolean).join(" · "))),
    isHere
      ? h("span.muted.small", served.includes(name) ? "Served" : "On this machine")
      : button("get", "Download", name, () => watchPull(name), { waits: fits === false || pulls.has(name) }),
  );
}

/** Starts a download, or watches the one that is under way. */
async function watchPull(name) {
  if (pulls.get(name)?.state === "downloading") return;
  const tell = (news) => {
    pulls.set(name, { ...pulls.get(name), error: null, ...news, model: name }); // the end of one that fails has no bytes
    drawHub();
  };
  tell({ state: "downloading" });
  try {
    for await (const news of jsonLines(await ask("v1/models/pull", { body: { model: name } }))) tell(news);
  } catch (error) {
    tell({ state: "failed", error: error.message });
  }
  if (pulls.get(name).state !== "failed") pulls.delete(name);
  forgetLocal();
  await readLocal();
}

function pullRow({ model, state, error, bytes: done = 0, total_bytes: total, bytes_per_second: rate }) {
  const close = () => {
    pulls.delete(model);
    drawHub();
  };
  const cancel = () => ask("v1/models/pull/cancel", { body: { model } }).catch(() => null);
  if (state === "failed")
    return h(
      "li",
      h(
        "div",
        h("b", { title: model }, model),
        h("p.problem", { role: "alert" }, inline(error)),
        done > 0 && h("p.muted.small", `${fileSize(done)} of ${fileSize(total)} are here, and are kept`),
      ),
      h("div.actions", button("retry", "Try again", model, () => watchPull(model)), button("close", "Close", model, close)),
    );
  const progress = {
    stage: total ? "downloading" : "asking the hub",
    fraction: total ? done / total : 0,
    bytes: done,
    total_bytes: total,
    bytes_per_second: rate,
  };
  return h("li", h("div", h("b", { title: model }, model), progressBar(progress)), button("cancel", "Cancel", model, cancel));
}
