// The settings in force: what differs from the defaults, what automatic ones came to, and changes.

import { adminProblem, ask, get } from "./api.js";
import { $, bytes, copy, count, empty, h, seconds } from "./dom.js";
import { inline } from "./rich.js";

const SECRET = "api_keys";

let sections = [];
/** The full name of the setting that is being changed, and why the last try failed. */
let editing = null;
let problem = "";

export async function showSettings() {
  if (editing) return;
  try {
    sections = (await get("v1/settings")).sections;
    if (!$("settings-body").querySelector(".filter")) frame();
    update();
  } catch (error) {
    $("settings-body").replaceChildren(empty("The settings can’t be shown", adminProblem(error)));
  }
}

function frame() {
  const button = h("button.quiet", { onclick: () => copy(button, toml()) }, "Copy as TOML");
  $("settings-body").replaceChildren(
    h(
      "div.filter",
      h("label.hidden", { for: "find-setting" }, "Find a setting"),
      h("input", { type: "search", id: "find-setting", placeholder: "Find a setting", oninput: update }),
      h("label.check", h("input", { type: "checkbox", id: "all-settings", onchange: update }), "Show all"),
      button,
    ),
    h("p.muted.small", { role: "status", id: "settings-found" }),
    h("div.cards.one", { id: "settings-list" }),
  );
}

const isChanged = ({ source, value, default: usual }) =>
  source !== "default" && JSON.stringify(value) !== JSON.stringify(usual);
const cameTo = ({ effective, value }) => effective !== null && effective !== value;

function update() {
  const wanted = $("find-setting").value.trim().toLowerCase();
  const all = $("all-settings").checked || wanted !== "";
  const shown = sections
    .map(({ name, settings }) => ({
      name,
      settings: settings.filter(
        (one) =>
          (all || isChanged(one) || cameTo(one)) &&
          `${name}.${one.name} ${one.description}`.toLowerCase().includes(wanted),
      ),
    }))
    .filter(({ settings }) => settings.length);
  $("settings-list").replaceChildren(...shown.map(section));
  const many = sections.flatMap(({ settings }) => settings).filter(isChanged).length;
  $("settings-found").textContent = shown.length
    ? all
      ? ""
      : `${many === 1 ? "1 setting differs" : `${many} settings differ`} from the default; below are these, and what automatic ones came to.`
    : "No setting is called that.";
}

function section({ name, settings }) {
  return h(
    "section.card",
    h("header", h("h2", name)),
    h(
      "dl.settings",
      settings.map((one) => setting(name, one)),
    ),
  );
}

function setting(part, one) {
  const { name, value, default: usual, source, effective, description, live } = one;
  const full = `${part}.${name}`;
  const from = source === "command line" ? "Set on the command line" : source[0] === "/" || source.startsWith("VLM_") ? `Set in ${source}` : source;
  const notes = [
    cameTo(one) && `came to ${show(name, effective)}`,
    isChanged(one) && `${from}; default ${show(name, usual)}`,
  ];
  return h(
    "div",
    { class: isChanged(one) ? "changed" : null },
    h("dt", h("code", name)),
    h(
      "dd.value",
      h("code", { title: String(value) }, show(name, value)),
      notes.filter(Boolean).map((note) => h("span.source", note)),
      live && editing !== full && h("button.link.small", { "aria-label": `Change ${full}`, onclick: () => edit(full) }, "Change"),
    ),
    h("dd.about", inline(description), live || !isChanged(one) ? "" : h("span.source", "A change needs a restart.")),
    editing === full && h("dd.edit", form(full, one)),
  );
}

function edit(full) {
  editing = full;
  problem = "";
  update();
  $("new-value")?.focus();
}

function form(full, { name, value }) {
  const field = h("input", { id: "new-value", value: String(value), autocomplete: "off", spellcheck: "false", "aria-label": `New value of ${full}`, "aria-describedby": "value-problem" });
  const close = () => {
    editing = null;
    update();
    document.querySelector(`[aria-label="Change ${CSS.escape(full)}"]`)?.focus();
  };
  const send = async (event) => {
    event.preventDefault();
    try {
      const body = { [full]: field.value.trim() };
      sections = (await (await ask("v1/settings", { method: "PATCH", body })).json()).sections;
      close();
    } catch (error) {
      problem = error.message;
      $("value-problem").textContent = problem;
      field.setAttribute("aria-invalid", "true");
      field.focus();
    }
  };
  return h(
    "form",
    { onsubmit: send },
    h("p.row.wraps", field, h("button.primary.small", "Save"), h("button.quiet.small", { type: "button", onclick: close }, "Cancel")),
    h("p.problem", { id: "value-problem", role: "alert" }, problem),
    h("p.muted.small", name.endsWith("_seconds") ? "A time, as 90s or 5m. " : "", "Until the server ends: to keep it, copy it as TOML into its settings file."),
  );
}

/** What differs from the defaults, as a settings file has it; keys are left out. */
function toml() {
  const parts = sections.flatMap(({ name, settings }) => {
    const lines = settings.filter((one) => isChanged(one) && one.name !== SECRET).map((one) => `${one.name} = ${literal(one.value)}`);
    return lines.length ? [`[${name.startsWith("models.") ? `models.${JSON.stringify(name.slice(7))}` : name}]\n${lines.join("\n")}\n`] : [];
  });
  return parts.join("\n") || "# Every setting has its default.\n";
}

// TOML's strings, numbers, booleans and lists of these are those of JSON, but for tables
const literal = (value) => JSON.stringify(value);

const UNITS = { _tokens: "tokens", _pixels: "pixels", _chars: "characters" };

function show(name, value) {
  if (value === "" || value === null || value?.length === 0) return "none";
  if (Array.isArray(value)) return value.join(", ");
  if (typeof value !== "number") return typeof value === "object" ? JSON.stringify(value) : String(value);
  if (name.endsWith("_bytes")) return value > 1023 ? bytes(value) : `${value} B`;
  if (name.endsWith("_seconds")) return value ? seconds(value) : "0 s";
  const unit = UNITS[name.slice(name.lastIndexOf("_"))];
  return unit ? `${count(value)} ${unit}` : String(value);
}
