// How one setting is changed: what its value is entered with, the check of it, and where it then goes.

import { ask } from "./api.js";
import { copy, h, inline } from "./dom.js";

const CHECK_MS = 300;

export const fullName = ({ section, name }) => `${section}.${name}`;
export const plain = (written) => (Array.isArray(written) ? written.join(", ") : String(written));

/** The form for a new value of `one`: `save(value)` takes it if it can change while the server runs, else it is copied
 * for the settings file, which is called `file`. Nothing wrong is saved or copied. */
export function settingForm(one, file, save) {
  let timer = null;
  const entry = entryOf(one, () => {
    snippet.textContent = lineOf(one, entry.read());
    clearTimeout(timer);
    timer = setTimeout(() => entry.field.isConnected && checks.check(), CHECK_MS);
  });
  const snippet = h("code", lineOf(one, entry.read()));
  const checks = new Checks(one, entry);
  const finish = async (event) => {
    event.preventDefault();
    if (!checks.isSound() && !(await checks.check())) return entry.field.focus();
    if (!one.live) return copy(button, lineOf(one, entry.read()));
    await save(entry.read()).catch((error) => checks.say(error.message));
  };
  const button = h("button.primary.small", one.live ? "Save" : "Copy as TOML");
  return h(
    "form",
    { onsubmit: finish, novalidate: true },
    h("div.row.wraps", entry.element, button, h("button.quiet.small", { type: "reset" }, "Cancel")),
    checks.problem,
    !one.live && h("pre", { tabindex: "0", "aria-label": "For the settings file" }, snippet),
    h("p.muted.small", one.live ? "It holds at once, until the server ends: to keep it, copy it as TOML into the settings file." : afterwards(one, file)),
  );
}

/** Says what is wrong with the value that is entered. */
class Checks {
  constructor(one, entry) {
    Object.assign(this, { one, entry, sound: null, said: "" }); // `sound` is the last value that was right
    this.problem = h("p.problem", { id: "value-problem", role: "alert" });
  }

  value = () => JSON.stringify(this.entry.read());
  isSound = () => this.value() === this.sound;

  say(text) {
    if (text !== this.said) this.problem.replaceChildren(...inline(text)); // what stays is not spoken again
    this.said = text;
    this.entry.field.setAttribute("aria-invalid", String(Boolean(text)));
  }

  /** Whether the value is right; not if it changes meanwhile. */
  async check() {
    const checked = this.value();
    const text = this.isSound() ? "" : await faultOf(this.one, this.entry.read());
    if (this.value() !== checked) return false;
    this.say(text ?? "");
    this.sound = text === "" ? checked : null;
    return !text;
  }
}

/** What is wrong with a value, in words; "" if nothing is, null if nobody can say. */
async function faultOf(one, value) {
  try {
    await ask("v1/settings?check=true", { method: "PATCH", body: { [fullName(one)]: value }, isLook: true });
    return "";
  } catch (error) {
    if (!error.status) return null;
    const text = error.message.replace(`\`${fullName(one)}\`: `, "");
    return text ? text[0].toUpperCase() + text.slice(1) : `The server answered with status ${error.status}.`;
  }
}

function afterwards({ section, name, source }, file) {
  const wins = source === "command line" ? "the command line" : source.startsWith("VLM_") && source;
  return [
    `It can’t change while the server runs: put this into ${file}, and start the server again. If the file has ${header(section)} already, put only the second line below that, in place of one for ${name}.`,
    wins && ` What ${wins} says wins over the file.`,
  ].filter(Boolean).join("");
}

// ---- entries ----------------------------------------------------------------------------------

/** What a value is entered with: {element, field, read()}; `read` gives it as JSON and TOML have it. */
function entryOf(one, changed) {
  const named = { "aria-label": `New value of ${fullName(one)}`, "aria-describedby": "value-problem", oninput: changed };
  if (one.choices?.length) return choiceEntry(one, named);
  if (one.is_list || one.is_text || one.choices === undefined) return textEntry(one, named);
  return numberEntry(one, named, changed);
}

const SHOWN = { true: "Yes", false: "No" };

function choiceEntry({ choices, value }, named) {
  const field = h("select", named, choices.map((each) => h("option", { selected: each === value }, SHOWN[each] ?? String(each))));
  return { element: h("span.pick", field), field, read: () => choices[field.selectedIndex] };
}

function textEntry(one, named) {
  const field = h("input", { ...named, value: plain(one.value_written), autocomplete: "off", spellcheck: "false" });
  return { element: field, field, read: () => typed(field.value.trim(), one) };
}

/** What was typed: the word for an empty value, a list by its commas, or a text as it is. */
function typed(text, { is_list: isList, word }) {
  if (word && ["", word].includes(text)) return word;
  return isList ? text.split(",").map((each) => each.trim()).filter(Boolean) : text;
}

const UNITS = { bytes: ["MiB", "GiB", "TiB"], seconds: ["s", "min", "h"], pixels: ["MP"] };
const PLAIN = { seconds: "s", pixels: "px", fps: "frames/s" };
const SIZES = { MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, MP: 1e6 };
const USUAL_SHARE = 75;

/** A number and its unit; among the units is the word for an automatic value, and for a share there is a slider. */
function numberEntry(one, named, changed) {
  const { unit: kind, word, effective, is_share: isShare } = one;
  const own = PLAIN[kind] ?? (kind || "number"); // that of a number without one
  const [, number, given] = String(one.value_written).match(/^([\d.]+) ?(.*)$/) ?? [null, "", word];
  const unit = given || (Number(number) ? own : (UNITS[kind]?.[1] ?? own)); // 0 GiB
  const units = [...new Set([...(UNITS[kind] ?? [own]), unit, isShare && "%", word].filter(Boolean))];
  const field = h("input", { ...named, type: "number", min: 0, step: "any", inputmode: "decimal", value: number });
  const slider = h("input", { type: "range", min: 5, max: 100, step: 5, "aria-label": "Share", oninput: () => ((field.value = slider.value), changed()) });
  const select = h("select", { "aria-label": `Unit of ${fullName(one)}`, oninput: () => (arrange(), changed()) }, units.map((each) => h("option", { selected: each === unit }, each)));
  const arrange = () => {
    const isWord = select.value === word;
    field.hidden = isWord;
    if (select.value === "%" && !(field.value > 0 && field.value <= 100)) field.value = USUAL_SHARE;
    else if (!isWord && field.value === "" && effective) field.value = +(effective / (SIZES[select.value] ?? 1)).toFixed(1);
    slider.hidden = select.value !== "%";
    slider.value = field.value;
  };
  field.addEventListener("input", () => (slider.value = field.value));
  arrange();
  const read = () => {
    if (select.value === word) return word;
    if (field.value === "" || select.value === own) return field.value && Number(field.value);
    return `${field.value}${select.value === "%" ? "" : " "}${select.value}`;
  };
  const choice = units.length > 1 ? h("span.pick", select) : own !== "number" && h("span.muted", own);
  return { element: h("span.entry", field, choice, slider), field, read };
}

// ---- TOML -------------------------------------------------------------------------------------

// TOML's strings, numbers, booleans and lists of these are those of JSON, but for tables
const header = (name) => `[${name.startsWith("models.") ? `models.${JSON.stringify(name.slice(7))}` : name}]`;
export const table = (name, settings) =>
  `${header(name)}\n${settings.map(([key, value]) => `${key} = ${JSON.stringify(value)}\n`).join("")}`;
const lineOf = (one, value) => table(one.section, [[one.name, value]]);
