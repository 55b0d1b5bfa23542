// What a question is asked with: the model, its options with checks in words, and a second way to compare with.
// Options that differ from the defaults are kept in this browser.

import { later } from "./api.js";
import { $, count, keep, kept } from "./dom.js";
import { schemaProblem, toolsProblem } from "./schema.js";
import { offer } from "./serving.js";

const KEPT = "vlm_server options";
const FIELDS = ["max-tokens", "temperature", "detail", "system", "schema", "tools"];
const DETAILS = { low: "Small pictures", high: "Large pictures" };
const CLICK_TOOL = [
  {
    type: "function",
    function: {
      name: "click",
      parameters: {
        type: "object",
        properties: { x: { type: "integer" }, y: { type: "integer" } },
        required: ["x", "y"],
      },
    },
  },
];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { shape: { type: "string" }, color: { type: "string" }, count: { type: "integer" } },
  required: ["shape", "color", "count"],
  additionalProperties: false,
};

/** What `/v1/models` says of all models. */
let models = [];

export const modelNamed = (name) => models.find(({ id }) => id === name) ?? models[0];
export const imageLimits = () => chosen()?.image_limits ?? models.find((one) => one.image_limits)?.image_limits;
const chosen = () => modelNamed($("ask-model").value);

export function setModels(told) {
  models = told;
  offer(
    $("ask-model"),
    models.map(({ id }) => id),
  );
  choose();
}

function choose() {
  const can = chosen().capabilities;
  $("think-field").hidden = !can?.includes("thinking");
  document.body.classList.toggle("blind", can?.length > 0 && !can.includes("vision"));
  offerComparisons();
  showChecks();
  dispatchEvent(new Event("options"));
}

/** What the answer can be compared with: other models, and other sizes of the pictures. */
function offerComparisons() {
  const select = $("compare-with");
  const before = select.value;
  const others = models.filter(({ id }) => id !== chosen()?.id).map(({ id }) => [`model ${id}`, id]);
  const sizes = ["", "low", "high"].filter((one) => one !== $("detail").value);
  const offered = [...others, ...sizes.map((one) => [`detail ${one}`, DETAILS[one] ?? "Pictures as usual"])];
  select.replaceChildren(...offered.map(([value, text]) => new Option(text, value)));
  if (offered.some(([value]) => value === before)) select.value = before;
}

export function startOptions() {
  $("show-options").addEventListener("click", () => toggle());
  $("ask-model").addEventListener("change", choose);
  $("click-tool").addEventListener("click", () => insert("tools", CLICK_TOOL));
  $("schema-example").addEventListener("click", () => insert("schema", EXAMPLE_SCHEMA));
  $("reset-options").addEventListener("click", () => {
    for (const id of FIELDS) $(id).value = "";
    $("think").checked = false;
    changed();
  });
  for (const id of [...FIELDS, "think"]) $(id).addEventListener("input", changed);
  $("show-compare").addEventListener("click", () => {
    $("compare").hidden = !$("compare").hidden;
    $("show-compare").setAttribute("aria-pressed", String(!$("compare").hidden));
    if (!$("compare").hidden) $("compare-with").focus();
  });
  recall();
  offerComparisons();
  showChecks();
}

function insert(id, value) {
  $(id).value = JSON.stringify(value, null, 1);
  changed();
  $(id).focus();
}

function changed() {
  const set = Object.fromEntries(FIELDS.map((id) => [id, $(id).value]).filter(([, value]) => value !== ""));
  if ($("think").checked) set.think = true;
  keep(KEPT, Object.keys(set).length ? JSON.stringify(set) : "");
  offerComparisons();
  showChecks();
  dispatchEvent(new Event("options"));
}

function recall() {
  try {
    const set = JSON.parse(kept(KEPT) ?? "{}");
    for (const id of FIELDS) if (typeof set[id] === "string") $(id).value = set[id];
    $("think").checked = Boolean(set.think);
  } catch {
    // nothing that can be read
  }
}

/** What is wrong with each field, in words; "" if nothing is. */
function problems() {
  const room = chosen()?.max_model_len;
  const tokens = $("max-tokens");
  const number = Number(tokens.value);
  const isWhole = tokens.value === "" ? !tokens.validity.badInput : Number.isInteger(number) && number > 0;
  const warmth = $("temperature");
  const heat = Number(warmth.value);
  const isWarmth = warmth.value === "" ? !warmth.validity.badInput : heat >= 0 && heat <= 2;
  return {
    "max-tokens": !isWhole
      ? "A whole number of tokens, 1 or more."
      : room && number > room
      ? `The model has room for ${count(room)} tokens, the question included.`
      : "",
    temperature: isWarmth ? "" : "A number from 0, always the likeliest word, to 2.",
    schema: schemaProblem($("schema").value),
    tools: toolsProblem($("tools").value),
  };
}

function showChecks() {
  for (const [id, text] of Object.entries(problems())) {
    const place = $(`${id}-problem`);
    if (place.textContent !== text) place.textContent = text;
    $(id).setAttribute("aria-invalid", String(Boolean(text)));
  }
  const isChanged = FIELDS.some((id) => $(id).value !== "") || $("think").checked;
  $("show-options").classList.toggle("changed", isChanged);
  $("reset-options").hidden = !isChanged;
}

/** How to ask: {model, label, system, fields, detail}; null if an option is wrong, which is shown. */
export function asked() {
  const wrong = Object.entries(problems()).find(([, text]) => text);
  if (wrong) {
    toggle(true);
    $(wrong[0]).focus();
    return null;
  }
  const fields = {};
  const value = (id) => $(id).value.trim();
  if (value("max-tokens")) fields.max_tokens = Number(value("max-tokens"));
  if (value("temperature")) fields.temperature = Number(value("temperature"));
  if (!$("think-field").hidden) fields.chat_template_kwargs = { enable_thinking: $("think").checked };
  if (value("schema"))
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(value("schema")), strict: true } };
  if (value("tools")) fields.tools = JSON.parse(value("tools"));
  const model = models.length > 1 ? chosen().id : "default";
  return { model, label: "", system: value("system"), fields, detail: value("detail") };
}

/** How to ask, once or in two ways; null if an option is wrong. */
export function ways() {
  const first = asked();
  if (!first || $("compare").hidden) return first && [first];
  const [, kind, value] = $("compare-with").value.match(/^(\w+) (.*)$/);
  const second = { ...first, [kind]: value };
  const name = kind === "model" ? (way) => way.model : (way) => DETAILS[way.detail] ?? "Pictures as usual";
  return [first, second].map((way) => ({ ...way, label: name(way) }));
}

function toggle(open = $("options").hidden) {
  $("options").hidden = !open;
  if (open) later("./schema_fields.js").then((module) => module?.startFields());
  $("show-options").setAttribute("aria-expanded", String(open));
  dispatchEvent(new Event("options"));
}

export const closeOptions = () => {
  if ($("options").hidden) return false;
  toggle(false);
  $("show-options").focus();
  return true;
};

/** About how many tokens the pictures cost, with the chosen model and size; null if that is not known. */
export function pictureTokens(media) {
  const seen = chosen()?.image_limits?.seen;
  if (!seen || !media.length || media.some(({ kind }) => kind !== "image")) return null;
  return media.reduce((sum, one) => sum + tokensOf(one, seen, $("detail").value), 0);
}

const LOW_SIDE = 512;
const HIGH_TOKENS = 1024;

function tokensOf({ width, height }, { min_pixels: least, max_pixels: most, side_multiple: side }, detail) {
  const shrink = detail === "low" ? Math.min(1, LOW_SIDE / Math.max(width, height)) : 1;
  const [w, h] = [width * shrink, height * shrink];
  const atLeast = detail === "high" ? Math.min(Math.max(least, HIGH_TOKENS * side * side), most) : least;
  const scale = Math.sqrt(Math.min(Math.max(w * h, atLeast), most) / (w * h));
  const cells = (length) => Math.max(1, Math.round((length * scale) / side));
  return cells(w) * cells(h);
}
