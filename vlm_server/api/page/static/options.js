// What a question is asked with: the model, its options with checks in words, and a second way to compare with.
// Options that differ from the defaults are kept in this browser.

import { later } from "./api.js";
import { $, count, keep, kept } from "./dom.js";
import { schemaProblem, toolsProblem } from "./schema.js";
import { offer } from "./serving.js";

const KEPT = "vlm_server options";
const FIELDS = ["max-tokens", "temperature", "detail", "system", "schema", "tools"];
const SIZES = { "": "Pictures as usual", low: "Small pictures", high: "Large pictures" };
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
  showChecks();
  dispatchEvent(new Event("options"));
}

/** What the answer to a question about `media` can be compared with: other models, and other sizes of the pictures. */
export function offerComparisons(media) {
  const select = $("compare-with");
  const before = select.value;
  const images = media.filter(({ kind }) => kind === "image");
  const others = models.filter(({ id }) => id !== chosen()?.id).map(({ id }) => [`model ${id}`, id]);
  const offered = [...others, ...otherSizes(images)];
  select.replaceChildren(...offered.map(([value, text]) => new Option(text, value)));
  if (offered.some(([value]) => value === before)) select.value = before;
  for (const part of [select.parentElement, select.labels[0]]) part.hidden = !offered.length;
  $("compare-none").textContent = offered.length ? "" : images.length ? ONE_SIZE : NO_PICTURE;
}

const ONE_SIZE = "Nothing to compare: this model sees these pictures at one size, and no other model is served.";
const NO_PICTURE = "Nothing to compare yet: add a picture, to ask about it in two sizes.";

/** The other sizes of pictures, but for those at which the model would see `images` alike: [value, text]. */
function otherSizes(images) {
  const limits = chosen()?.image_limits;
  const at = (detail) => (limits === undefined ? detail : images.map((one) => seenAs(one, limits?.seen, detail).join(" × ")).join(", "));
  const known = new Set([at($("detail").value)]);
  const differs = (detail) => !known.has(at(detail)) && known.add(at(detail));
  const size = (detail) => (images.length === 1 && limits?.seen ? `, ${at(detail)}` : "");
  return images.length ? Object.keys(SIZES).filter(differs).map((one) => [`detail ${one}`, SIZES[one] + size(one)]) : [];
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
  if (!first || $("compare").hidden || !$("compare-with").value) return first && [first];
  const [, kind, value] = $("compare-with").value.match(/^(\w+) (.*)$/);
  const second = { ...first, [kind]: value };
  const name = kind === "model" ? (way) => way.model : (way) => SIZES[way.detail];
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
  const tokens = ([width, height]) => (width * height) / seen.side_multiple ** 2;
  return media.reduce((sum, one) => sum + tokens(seenAs(one, seen, $("detail").value)), 0);
}

const LOW_SIDE = 512;
const HIGH_TOKENS = 1024; // not for checkpoints that were made for smaller pictures

/** Width and height at which the model sees a picture; without `seen`, those at which it gets it. */
function seenAs({ width, height }, seen, detail) {
  const shrink = detail === "low" ? Math.min(1, LOW_SIDE / Math.max(width, height)) : 1;
  const sides = [width * shrink, height * shrink];
  if (!seen) return sides.map(Math.round);
  const { min_pixels: least, max_pixels: most, side_multiple: side } = seen;
  const wanted = detail === "high" ? HIGH_TOKENS * side * side : 0;
  const atLeast = wanted > most ? least : Math.max(least, wanted);
  const scaled = (pixels, round) => sides.map((each) => Math.max(1, round((each * Math.sqrt(pixels / (sides[0] * sides[1]))) / side)));
  const area = (cells) => cells[0] * cells[1] * side * side;
  let cells = scaled(sides[0] * sides[1], Math.round);
  if (area(cells) < atLeast) cells = scaled(atLeast, Math.ceil);
  if (area(cells) > most) cells = scaled(most, Math.floor);
  return cells.map((each) => each * side);
}
